"""The pages in a real browser, on recorded runs: they draw, share one cursor, keep their address, fit a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from keelscope_dashboards.pages import PAGES

CHROMIUM = Path("/usr/bin/chromium")
WAIT = 20_000  # ms, for a loaded machine
NAMES = [page.name for page in PAGES if page.build is not None]

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
if not CHROMIUM.exists():
    pytest.skip(f"the browser tests need {CHROMIUM} (Debian package chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def site(kit: ModuleType, recorded: Any) -> Iterator[str]:
    with kit.at_port(recorded) as url:
        yield url


def drawn(page: Any, name: str) -> None:
    page.wait_for_selector(f"body[data-drawn={name}]", timeout=WAIT)


def says(page: Any, selector: str, wanted: str) -> None:
    playwright.expect(page.locator(selector).first).to_contain_text(wanted, timeout=WAIT)


def inked(page: Any) -> list[int]:
    """How many pixels each chart of the page has drawn."""
    return page.evaluate(
        """() => [...document.querySelectorAll('#page .chart canvas')].map((canvas) => {
          const copy = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
          Object.assign(copy.canvas, { width: canvas.width, height: canvas.height });
          copy.drawImage(canvas, 0, 0);
          const data = copy.getImageData(0, 0, canvas.width, canvas.height).data;
          let n = 0;
          for (let i = 3; i < data.length; i += 4) n += data[i] > 0;
          return n;
        })"""
    )


def test_every_page_draws_a_recorded_run(visit: Callable[..., Any]) -> None:
    page = visit("about?run=keel")
    for one in PAGES[1:]:
        page.locator(f"#page-{one.name}").click()
        drawn(page, one.name)
        says(page, "h1:visible", one.title)
        assert page.title() == f"{one.title} · keelscope"
        assert page.locator(".page-link[aria-current=page]").inner_text() == one.title
        playwright.expect(page.locator("#overview")).to_be_hidden()
        page.wait_for_timeout(200)
        assert all(count > 50 for count in inked(page)), one.name
        assert page.locator("#page .chart").count() > 0 or one.name in {"paths", "gates", "diagnostics", "about"}
        assert page.evaluate("document.querySelectorAll('*').length") < 4000


def test_paths_and_gates_draw_the_groups_that_are_there(visit: Callable[..., Any]) -> None:
    page = visit("paths?run=with_paths")
    drawn(page, "paths")
    assert len(inked(page)) == 6
    page.locator("#page-gates").click()
    drawn(page, "gates")
    page.wait_for_timeout(400)
    assert len(inked(page)) == 4
    assert min(inked(page)) > 200
    says(page, "#page", "1 exactly 0")


def test_a_missing_group_says_how_to_record_it(visit: Callable[..., Any]) -> None:
    page = visit("paths?run=post_ln")
    says(page, "#page .notice", "post_ln does not record sublayers")
    says(page, "#page .notice pre", 'probes=["default", "sublayers"]')
    page.locator("#page-gates").click()
    says(page, "#page .notice", "post_ln has no gates")


def test_one_cursor_for_all_pages_and_the_back_button(visit: Callable[..., Any]) -> None:
    page = visit("depth?run=keel&step=6&layer=2")
    drawn(page, "depth")
    box = page.locator("#page .chart canvas").first.bounding_box()
    page.mouse.click(box["x"] + 0.94 * box["width"], box["y"] + 0.5 * box["height"])
    says(page, ".scrub", "sub-layer 8")
    page.locator("#page-layer").click()
    drawn(page, "layer")
    says(page, "#page .heading", "sublayers.7")
    assert "/layer?run=keel&step=6&layer=8" in page.url
    page.locator(".turn").first.click()
    says(page, "#page .heading", "sublayers.6")
    page.locator("#page-overview").click()
    says(page, "#where", "sub-layer 7, step 6 · keel")
    page.go_back()
    drawn(page, "layer")
    says(page, ".scrub", "sub-layer 7")
    page.go_back()
    drawn(page, "depth")
    says(page, "h1:visible", "Depth profile")
    page.go_forward()
    drawn(page, "layer")


def test_the_address_of_a_page_brings_it_back(visit: Callable[..., Any]) -> None:
    asked = "run=pre_ln&runs=pre_ln,keel&step=4&layer=3&series=outputs/variance,gradients/norm&at=first&scale=linear"
    page = visit(f"depth?{asked}")
    drawn(page, "depth")
    assert page.locator("#page h2").all_inner_texts() == ["outputs/variance", "gradients/norm"]
    says(page, ".scrub", "step 4")
    page.locator("#page .segments button", has_text="Log").click()
    page.wait_for_url("**scale=log**")
    again = visit("depth?" + page.url.partition("depth?")[2])
    drawn(again, "depth")
    assert again.locator("#page h2").all_inner_texts() == ["outputs/variance", "gradients/norm"]
    assert again.locator(".control button[aria-pressed=true]").all_inner_texts() == ["First step", "Log"]
    assert again.locator("[data-show][aria-pressed=true]").count() == 2
    says(again, ".scrub", "step 4")


def test_keys_turn_pages_move_the_cursor_and_play(visit: Callable[..., Any]) -> None:
    page = visit("depth?run=keel&step=5&layer=4")
    drawn(page, "depth")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    says(page, ".scrub", "step 6")
    says(page, ".scrub", "sub-layer 5")
    page.keyboard.press("p")
    drawn(page, "heatmap")
    page.keyboard.press("P")
    drawn(page, "depth")
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    says(page, ".scrub", "step 11")
    playwright.expect(page.locator(".scrub .play")).to_have_attribute("aria-pressed", "false", timeout=WAIT)


def test_the_profile_follows_the_slider(visit: Callable[..., Any], recorded_folder: Path) -> None:
    from keelscope.store.reader import open_run

    page = visit("depth?run=keel&at=now")
    drawn(page, "depth")
    page.locator("#scrub-step").focus()
    page.keyboard.press("Home")
    says(page, "#page .keys", "keel · step 0")
    shown = page.evaluate("keelscope.view.pages.blocks.length && [...document.querySelectorAll('.key')].length")
    assert shown == 4
    with open_run(recorded_folder / "keel.h5") as run:
        truth = run["gradients/rms"].of("sublayers.4").at(0)[0]
    box = page.locator("#page .chart canvas").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 4.5 / 8, box["y"] + 40)
    says(page, "#page .tip", "sub-layer 5")
    tip = page.locator("#page .tip").first.inner_text().split("\n")
    keel = next(line for line in tip if line.endswith("keel · step 0"))
    assert keel.startswith(page.evaluate("(v) => keelscope.value(Math.log10(v))", float(truth)))


def test_the_heatmap_takes_any_series_and_scale(visit: Callable[..., Any]) -> None:
    page = visit("heatmap?run=keel")
    drawn(page, "heatmap")
    says(page, ".block .legend", "decades vs output side")
    page.locator("#page select").first.select_option("norms/sigma_max")
    says(page, ".block .chip", "norms/sigma_max")
    page.locator("#page .segments button", has_text="Linear").click()
    page.wait_for_url("**scale=linear**")
    page.locator("select[data-control=part]").select_option("outer_norm")
    page.wait_for_url("**part=outer_norm**")
    says(page, ".block .legend", "not observed")
    page.wait_for_timeout(300)
    assert inked(page)[0] > 10_000
    box = page.locator("#page .chart canvas").first.bounding_box()
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 3)
    says(page, ".scrub", "sub-layer 8")


def test_a_finding_leads_to_the_overview(visit: Callable[..., Any], kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "post_ln.h5", "post_ln", layers=24, steps=20)
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        app.judged()
        page = visit("diagnostics", url=url)
        drawn(page, "diagnostics")
        says(page, ".findings.full", "Vanishing")
        says(page, ".evidence-list", "Limit")
        page.locator(".findings.full .show").first.click()
        says(page, "#where", "sub-layer 1, step 190 · post_ln")
        assert page.url.startswith(f"{url}?run=post_ln")
        page.close()


def test_pages_grow_with_a_live_run(visit: Callable[..., Any], kit: ModuleType, tmp_path: Path) -> None:
    rows = kit.rows_of("keel", 8, 30)
    writer = kit.RunWriter(tmp_path / "live.h5", kit.layout_of(8, planned=300))
    for row in rows[:5]:
        writer.append(row)
    writer.flush()
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit("depth?at=now", url=url)
        says(page, "#page .keys", "live · step 40")
        says(page, ".scrub .follow", "Following")
        for row in rows[5:]:
            writer.append(row)
        writer.close()
        says(page, "#page .keys", "live · step 290")
        page.close()


def test_an_empty_folder_says_how_to_record_on_every_page(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit("curves", url=url)
        playwright.expect(page.get_by_text("No runs yet")).to_be_visible()
        kit.write_run(tmp_path / "first.h5", "keel", layers=8, steps=5)
        drawn(page, "curves")
        says(page, "#page h2", "loss")
        playwright.expect(page.get_by_text("No runs yet")).to_be_hidden()
        page.close()


def test_a_phone_scrolls_no_page_sideways(visit: Callable[..., Any]) -> None:
    page = visit("depth?run=keel", viewport={"width": 390, "height": 844})
    for name in [*NAMES[1:], NAMES[0]]:
        page.locator("#menu").click()
        page.locator(f"#page-{name}").click()
        drawn(page, name)
        playwright.expect(page.locator("#side")).not_to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390, name


def test_the_theme_reaches_the_charts_of_a_page(visit: Callable[..., Any]) -> None:
    page = visit("compare?run=keel", color_scheme="light")
    drawn(page, "compare")
    ink = "document.querySelector('#page .chart canvas').toDataURL()"
    light = page.evaluate(ink)
    page.locator("#theme").click()
    page.wait_for_selector("html[data-scheme=dark]")
    page.wait_for_timeout(200)
    assert page.evaluate(ink) != light


def test_hostile_names_stay_text_on_every_page(visit: Callable[..., Any], kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "<img src=x onerror=alert(1)>.h5", "broken", layers=6, steps=30)
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        app.judged()
        page = visit("about", url=url)
        for name in ("depth", "heatmap", "layer", "curves", "diagnostics", "compare", "about"):
            page.locator(f"#page-{name}").click()
            drawn(page, name)
            says(page, "#main", "<img src=x onerror=alert(1)>" if name not in {"layer"} else "Single layer")
            assert page.locator("#main img").count() == 0
        page.close()
