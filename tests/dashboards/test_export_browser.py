"""What is saved from a page: the files open, need nothing else, and hold the numbers of the run."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest

CHROMIUM = Path("/usr/bin/chromium")
WAIT = 20_000  # ms, for a loaded machine

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
if not CHROMIUM.exists():
    pytest.skip(f"the browser tests need {CHROMIUM} (Debian package chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def site(kit: ModuleType, recorded: Any) -> Iterator[str]:
    with kit.at_port(recorded) as url:
        yield url


def saved(page: Any, folder: Path, press: Callable[[], None]) -> Path:
    with page.expect_download(timeout=WAIT) as waiting:
        press()
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


def from_menu(page: Any, folder: Path, panel: str, form: str) -> Path:
    page.locator(f"{panel} .more").first.click()
    return saved(page, folder, page.locator(f".menu [data-format={form}]").click)


def table(path: Path) -> tuple[list[str], list[list[str]]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = list(csv.reader(line for line in lines if not line.startswith("#")))
    return rows[0], rows[1:]


def size_of(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


def test_a_chart_is_saved_as_pictures_and_numbers(
    visit: Callable[..., Any], recorded_folder: Path, tmp_path: Path
) -> None:
    from keelscope.store.reader import open_run

    page = visit("depth?run=keel&runs=keel&step=6&at=now")
    page.wait_for_selector("#page .chart canvas")
    picture = ET.parse(from_menu(page, tmp_path, "#page", "svg")).getroot()
    words = "".join(picture.itertext())
    assert "gradients/rms" in words
    assert "keel · step 6" in words
    assert "sub-layer" in words
    assert len(picture.findall(".//{*}path")) > 8
    width, height = size_of(from_menu(page, tmp_path, "#page", "png").read_bytes())
    assert width == 2 * int(float(picture.get("width", 0)))
    assert height > 300
    head, rows = table(from_menu(page, tmp_path, "#page", "csv"))
    assert head == ["line", "sub-layer", "value"]
    with open_run(recorded_folder / "keel.h5") as run:
        for i, row in enumerate(rows):
            assert row[:2] == ["keel · step 6", str(i + 1)]
            truth = run["gradients/rms"].of(f"sublayers.{i}").at(6)[0]
            assert float(row[2]) == pytest.approx(float(truth), rel=1e-5)
    assert len(rows) == 8


def test_heatmaps_and_the_overview_are_saved_too(
    visit: Callable[..., Any], recorded_folder: Path, tmp_path: Path
) -> None:
    from keelscope.store.reader import open_run

    page = visit("?run=post_ln&step=5&layer=4")
    page.wait_for_selector("#value:not(:empty)")
    head, rows = table(from_menu(page, tmp_path, ".heatmap-panel", "csv"))
    assert head[:3] == ["first_step", "last_step", "sub-layer 1: sublayers.0"]
    assert len(rows) == 12
    with open_run(recorded_folder / "post_ln.h5") as run:
        truth = [run["gradients/rms"].of(f"sublayers.{i}").values[:, 0].tolist() for i in range(8)]
    assert [float(row[2]) for row in rows] == pytest.approx(truth[0], rel=1e-5)
    heat = from_menu(page, tmp_path, ".heatmap-panel", "svg").read_text(encoding="utf-8")
    assert heat.count("<image") == 1
    assert "data:image/png" in heat
    _, profile = table(from_menu(page, tmp_path, ".profile-panel", "csv"))
    own = [float(row[2]) for row in profile if row[0] == "post_ln"]
    assert own == pytest.approx([layer[5] for layer in truth], rel=2e-3)  # the browser holds 1/1000 of a decade
    _, history = table(from_menu(page, tmp_path, ".history-panel", "csv"))
    assert [float(row[1]) for row in history if row[0] == "post_ln"] == list(range(12))


def test_the_menu_is_reached_and_left_by_keyboard(visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit("diagnostics?run=keel")
    page.wait_for_selector("body[data-drawn=diagnostics]")
    table_menu = page.locator(".block.table .more").first
    table_menu.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "CSV data"
    page.keyboard.press("Escape")
    assert page.locator(".menu").count() == 0
    assert page.evaluate("document.activeElement.className") == "more"
    page.keyboard.press("Enter")
    head, rows = table(saved(page, tmp_path, lambda: page.keyboard.press("Enter")))
    assert head[:3] == ["What", "Status", "Reason"]
    assert rows


def test_a_page_is_saved_as_one_file_without_scripts(visit: Callable[..., Any], browser: Any, tmp_path: Path) -> None:
    page = visit("layer?run=keel&layer=3")
    page.wait_for_selector("body[data-drawn=layer]")
    charts = page.locator("#page div.chart").count()
    path = saved(page, tmp_path, page.locator("#save").click)
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "onclick" not in text
    context = browser.new_context(java_script_enabled=False)
    alone, asked = context.new_page(), []
    alone.on("request", lambda request: asked.append(request.url))
    alone.goto(path.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert alone.locator("section svg[role=img]").count() == charts > 10
    assert alone.locator("h1").inner_text() == "Single layer"
    context.close()
