"""axe-core on every page in light, dark and at phone width; where the environment variable AXE names its axe.min.js.

axe-core is no Python package, so that it is not installed with the others: ``npm pack axe-core`` brings it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from keelscope_dashboards.pages import PAGES

CHROMIUM = Path("/usr/bin/chromium")
AXE = Path(os.environ.get("AXE", ""))
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
if not CHROMIUM.exists() or not AXE.is_file():
    pytest.skip(f"needs {CHROMIUM} and AXE=path of axe.min.js", allow_module_level=True)


@pytest.fixture(scope="module")
def site(kit: ModuleType, recorded: Any) -> Iterator[str]:
    with kit.at_port(recorded) as url:
        yield url


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 1440), ("light", 390)])
def test_axe_finds_nothing_on_any_page(browser: Any, site: str, scheme: str, width: int) -> None:
    # The policy of the page forbids the script that is put into it here.
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page, found = context.new_page(), {}
    for one in PAGES:
        page.goto(f"{site}{'' if one.build is None else one.name}?run=with_paths")
        page.wait_for_selector("#value:not(:empty)" if one.build is None else f"body[data-drawn={one.name}]")
        page.wait_for_timeout(300)
        if page.locator(".more:visible").count():
            page.locator(".more:visible").first.click()
        page.evaluate(AXE.read_text(encoding="utf-8"))
        violations = page.evaluate(
            "(rules) => axe.run(document, { runOnly: rules })"
            ".then(({ violations }) => violations.map((one) => [one.id, one.nodes[0].html]))",
            RULES,
        )
        if violations:
            found[one.name] = violations
    context.close()
    assert found == {}
