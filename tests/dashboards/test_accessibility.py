"""axe-core on every page and on the HTML report, in light, dark and at phone width."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import keelscope as ks
from keelscope_dashboards.pages import PAGES

CHROMIUM = Path("/usr/bin/chromium")
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]

pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
FOUND = importlib.util.find_spec("axe_playwright_python")
if not CHROMIUM.exists() or FOUND is None or FOUND.origin is None:
    pytest.skip(f"needs {CHROMIUM} and the package axe-playwright-python", allow_module_level=True)
AXE = Path(FOUND.origin).with_name("axe.min.js").read_text(encoding="utf-8")


def violations_on(page: Any) -> list[list[str]]:
    """The rules of axe that the page breaks, each with the first place."""
    page.evaluate(AXE)
    found: list[list[str]] = page.evaluate(
        "(rules) => axe.run(document, { runOnly: rules })"
        ".then(({ violations }) => violations.map((one) => [one.id, one.nodes[0].html]))",
        RULES,
    )
    return found


@pytest.fixture(scope="module")
def site(kit: ModuleType, recorded: Any) -> Iterator[str]:
    with kit.at_port(recorded) as url:
        yield url


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1440), ("dark", 1440), pytest.param("light", 390, marks=pytest.mark.slow)]
)
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
        if violations := violations_on(page):
            found[one.name] = violations
    context.close()
    assert found == {}


@pytest.mark.parametrize(("scheme", "width"), [("light", 1000), ("dark", 1000), ("light", 390)])
def test_axe_finds_nothing_on_the_html_report(
    kit: ModuleType, browser: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    path = tmp_path / "report.html"
    ks.diagnose(kit.memory_run("broken", layers=24, steps=40)).to_html(path)
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(path.as_uri())
    found = violations_on(page)
    sideways = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    context.close()
    assert found == []
    assert sideways <= 0
