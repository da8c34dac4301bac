"""What happens to files and server while the page is open: it says so, and what can be shown stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import h5py
import pytest

CHROMIUM = Path("/usr/bin/chromium")
WAIT = 20_000  # ms, for a loaded machine

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
if not CHROMIUM.exists():
    pytest.skip(f"the browser tests need {CHROMIUM} (Debian package chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def site() -> str:
    return "http://127.0.0.1/"


def says(page: Any, selector: str, wanted: str) -> None:
    playwright.expect(page.locator(selector).first).to_contain_text(wanted, timeout=WAIT)


def test_a_file_cut_short_or_deleted_leaves_the_other_runs(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    cut, gone, kept = (kit.write_run(tmp_path / f"{name}.h5", "keel", layers=8, steps=20) for name in ("a", "b", "c"))
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        app.judged()
        page = visit("?run=a&step=100&layer=3", url=url)
        says(page, "#where", "sub-layer 3, step 100 · a")
        os.truncate(cut, cut.stat().st_size // 2)
        says(page, ".card.broken", "a.h5")
        says(page, "#where", "step 100 · b")
        assert page.locator(".run").count() == 3
        gone.unlink()
        playwright.expect(page.locator(".run")).to_have_count(2, timeout=WAIT)
        says(page, "#where", "step 100 · c")
        assert str(tmp_path) not in page.content()
        page.locator("#page-layer").click()
        page.wait_for_selector("body[data-drawn=layer]")
        assert kept.exists()
        page.close()


def test_a_server_that_comes_back_is_met_where_it_was_left(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    kit.write_run(tmp_path / "run.h5", "keel", layers=8, steps=20)
    with kit.served(tmp_path) as app:
        app.judged()
        with kit.at_port(app) as url:
            page = visit("?step=100&layer=3", url=url, lost=True)
            says(page, "#where", "sub-layer 3, step 100 · run")
        says(page, "#banner", "Connection to keelscope lost")
        says(page, "#pulse", "Not connected")
        page.keyboard.press("ArrowRight")
        says(page, "#where", "sub-layer 3, step 110 · run")
    with kit.served(tmp_path) as again, kit.at_port(again, urlsplit(url).port):
        playwright.expect(page.locator("#banner")).to_be_hidden(timeout=WAIT)
        kit.write_run(tmp_path / "second.h5", "post_ln", layers=8, steps=20)
        playwright.expect(page.locator(".card")).to_have_count(2, timeout=WAIT)
        says(page, "#where", "sub-layer 3, step 110 · run")
        page.close()


def test_a_file_that_reaches_for_another_is_refused(visit: Callable[..., Any], kit: ModuleType, tmp_path: Path) -> None:
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"TOP-SECRET" * 1000)
    runs = tmp_path / "runs"
    path = kit.write_run(runs / "hostile.h5", "keel", layers=8, steps=20)
    kit.write_run(runs / "plain.h5", "keel", layers=8, steps=20)
    with h5py.File(path, "r+") as file:
        group = next(item for name, item in named(file) if name.endswith("gradients"))
        shape = group["rms"].shape
        del group["rms"]
        group.create_dataset("rms", shape, "f8", external=[(str(secret), 0, 8 * shape[0] * shape[1])])
    with kit.served(runs) as app, kit.at_port(app) as url:
        page = visit(url=url)
        says(page, ".card.broken", "hostile")
        says(page, "#where", "plain")
        assert "TOP-SECRET" not in page.content()
        assert page.locator(".run[disabled]").count() == 1
        page.close()


def named(file: h5py.File) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    file.visititems(lambda name, item: found.append((name, item)) if isinstance(item, h5py.Group) else None)
    return found
