"""The page in a real browser: it loads clean and offline; pointer, keys, theme and live data do what they say."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
WAIT = 20_000  # ms, for a loaded machine

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")
if not CHROMIUM.exists():
    pytest.skip(f"the browser tests need {CHROMIUM} (Debian package chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def site(kit: ModuleType, three_runs: Any) -> Iterator[str]:
    three_runs.judged()
    with kit.at_port(three_runs) as url:
        yield url


def text_of(page: Any, selector: str, wanted: str) -> None:
    """Wait until an element says something."""
    playwright.expect(page.locator(selector)).to_contain_text(wanted, timeout=WAIT)


def holds(page: Any, expression: str) -> None:
    """Wait until an expression is true; the page's own polling would need the eval that its policy refuses."""
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def click_at(page: Any, chart: str, x: float, y: float) -> None:
    """Click inside the plot area, x and y from its lower left corner as shares."""
    page.wait_for_selector("#value:not(:empty)")
    box = page.locator(f"#{chart} canvas").bounding_box()
    page.mouse.click(box["x"] + x * box["width"], box["y"] + (1 - y) * box["height"])


def test_the_page_shows_runs_and_verdicts(visit: Callable[..., Any]) -> None:

    page = visit()
    text_of(page, "#cards", "Flat")
    assert page.locator(".card").count() == 3
    playwright.expect(page.locator(".card.focused, .run.focused")).to_have_count(2)
    assert page.locator(".run").all_inner_texts()[0].split("\n")[0] == "keel"
    text_of(page, ".card:nth-child(2)", "Vanishing")
    text_of(page, "#where", "sub-layer 19, step 590 · keel")


def test_a_click_in_the_heatmap_moves_step_and_layer(visit: Callable[..., Any], runs_folder: Path) -> None:
    from keelscope.store.reader import open_run

    page = visit()
    click_at(page, "heatmap", 0.502, 0.5)
    text_of(page, "#where", "sub-layer 33, step 300 · keel")
    text_of(page, "#profile-step", "at step 300")
    text_of(page, "#history-layer", "sub-layer 33")
    assert page.locator("#step").input_value() == "300"
    with open_run(runs_folder / "keel.h5") as run:
        truth = run["gradients/rms"].of("sublayers.32").at(300)[0]
    mantissa, exponent = page.locator("#value").inner_text().split(" \N{MULTIPLICATION SIGN} 10")
    power = int(exponent.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
    assert float(mantissa) * 10**power == pytest.approx(truth, rel=0.006)


def test_the_other_charts_and_the_slider_move_the_same_cursor(visit: Callable[..., Any]) -> None:
    page = visit()
    click_at(page, "profile", 0.5, 0.99)
    text_of(page, "#where", "layer 64, step 590")
    click_at(page, "history", 0.004, 0.5)
    text_of(page, "#where", "layer 64, step 0")
    page.locator("#step").focus()
    page.keyboard.press("End")
    text_of(page, "#where", "layer 64, step 590")


def test_the_heatmap_is_painted_with_the_colours_of_its_cells(visit: Callable[..., Any]) -> None:
    page = visit("?run=post_ln")
    page.wait_for_selector("#value:not(:empty)")
    pixels = page.evaluate(
        """() => {
          const ks = keelscope, view = ks.view, chart = view.scene.heatmap, tile = view.tile(), out = [];
          const table = ks.indexTable(tile.unit, view.settings.limit, view.scene.colours.length);
          const shown = chart.context.getImageData(0, 0, chart.canvas.width, chart.canvas.height).data;
          for (const [bin, layer] of [[0, 0], [30, 20], [59, 63], [10, 50]]) {
            const x = Math.round(chart.px((tile.edges[bin] + tile.edges[bin + 1]) / 2) * chart.ratio);
            const y = Math.round(chart.py(layer + 1) * chart.ratio);
            const code = tile.codes[bin * tile.layers + layer];
            const at = 4 * (y * chart.canvas.width + x), wanted = view.scene.colours[table[code & 0xffff]];
            out.push([`rgb(${shown[at]},${shown[at + 1]},${shown[at + 2]})`, ks.css(wanted)]);
          }
          return out;
        }"""
    )
    assert len(pixels) == 4
    assert all(shown == expected for shown, expected in pixels)
    assert len({shown for shown, _ in pixels}) == 4


def test_keys_move_the_cursor_the_run_and_the_metric(visit: Callable[..., Any]) -> None:
    page = visit()
    text_of(page, "#where", "sub-layer 19, step 590 · keel")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowUp")
    text_of(page, "#where", "sub-layer 29, step 580 · keel")
    page.keyboard.press("Home")
    page.keyboard.press("]")
    text_of(page, "#where", "sub-layer 29, step 0 · post_ln")
    page.keyboard.press("3")
    text_of(page, "#symbol", "Var(x)")
    text_of(page, "#legend-title", "decades vs input side")
    assert page.locator("#metric [aria-pressed=true]").all_inner_texts() == ["Output variance"]


def test_the_metric_switch_changes_all_charts(visit: Callable[..., Any]) -> None:
    page = visit()
    text_of(page, "#where", "keel")
    before = page.locator("#value").inner_text()
    page.get_by_text("Parameter gradient").click()
    text_of(page, "#symbol", "‖∂L/∂θ‖")
    playwright.expect(page.locator("#value")).not_to_have_text(before)


def test_a_card_focuses_its_run_and_an_eye_hides_one(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator(".card").nth(2).click()
    text_of(page, "#focused", "pre_ln")
    page.locator(".eye").nth(0).click()
    page.wait_for_url("**runs=post_ln,pre_ln**")
    assert page.locator(".eye").nth(0).get_attribute("aria-pressed") == "false"


def test_a_finding_leads_to_its_place(visit: Callable[..., Any]) -> None:
    page = visit()
    page.locator(".findings .show[data-rule=vanishing]").click()
    text_of(page, "#focused", "post_ln")
    text_of(page, "#where", "sub-layer 1, step")


def test_numbers_that_are_on_their_way_are_waited_for_and_not_asked_for_again(visit: Callable[..., Any]) -> None:
    """As where somebody clicks a finding of a run whose numbers have not all come."""
    script = """async () => {
      const ks = window.keelscope, data = new ks.Data(() => {}, () => {}, () => {});
      const run = (await (await fetch("api/v1/state")).json()).runs[0].id, binary = data.binary.bind(data);
      let asked = 0;
      data.binary = async (path) => {
        asked += 1;
        await new Promise((done) => setTimeout(done, 300));
        return binary(path);
      };
      data.want(run, "gradient", 1);
      await data.want(run, "gradient", 1);
      return [data.tile(run, "gradient") !== null, asked, data.busy.size];
    }"""
    assert visit().evaluate(script) == [True, 1, 0]


def test_the_address_brings_the_view_back(visit: Callable[..., Any]) -> None:
    page = visit("?run=pre_ln&metric=variance&step=123&layer=7")
    text_of(page, "#symbol", "Var(x)")
    assert page.locator("#metric [aria-pressed=true]").all_inner_texts() == ["Output variance"]
    text_of(page, "#where", "sub-layer 7, step 120 · pre_ln")
    page.wait_for_url("**step=120**")
    again = visit(page.url.partition("?")[1] + page.url.partition("?")[2])
    text_of(again, "#where", "sub-layer 7, step 120 · pre_ln")
    text_of(again, "#symbol", "Var(x)")
    bent = visit("?run=none&metric=none&step=1e12&layer=-4&x=9~3")
    text_of(bent, "#where", "sub-layer 1, step 590 · keel")


def test_blocks_of_two_sub_layers_are_named_as_in_the_report(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    kit.write_run(tmp_path / "run.h5", "keel", layers=24, steps=20, sublayers=2)
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit("?layer=14&step=100", url=url)
        text_of(page, "#where", "sub-layer 14, step 100 · run · sublayers.6")
        text_of(page, "#history-layer", "sub-layer 14 · sublayers.6")
        text_of(page, "#heatmap", "sub-layer (2 = input)")
        assert page.evaluate("keelscope.view.layer") == 7
        page.keyboard.press("ArrowUp")
        text_of(page, "#where", "sub-layer 16, step 100 · run · sublayers.7")
        page.wait_for_url("**layer=16**")
        box = page.locator("#heatmap canvas").bounding_box()
        page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 2)
        text_of(page, "#heatmap .tip", "sub-layer 48 · sublayers.23")
        page.close()


def test_zoom_about_the_pointer_and_back(visit: Callable[..., Any]) -> None:
    page = visit()
    click_at(page, "heatmap", 0.25, 0.25)
    whole = page.evaluate("keelscope.view.scene.heatmap.x")
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    playwright.expect(page.locator("#reset")).to_be_visible()
    zoomed = page.evaluate("keelscope.view.scene.heatmap.x")
    assert zoomed[1] - zoomed[0] < 0.8 * (whole[1] - whole[0])
    assert page.evaluate("keelscope.view.scene.history.x") == zoomed
    page.locator("#reset").click()
    playwright.expect(page.locator("#reset")).to_be_hidden()


def test_the_theme_switches_everything_and_is_remembered(visit: Callable[..., Any]) -> None:
    page = visit(color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.scheme") == "dark"
    page.wait_for_selector("#value:not(:empty)")
    colours = "[getComputedStyle(document.body).backgroundColor, keelscope.view.scene.scheme]"
    dark = page.evaluate(colours)
    page.locator("#theme").click()
    page.wait_for_selector("html[data-scheme=light]")
    light = page.evaluate(colours)
    assert (light[1], dark[1]) == ("light", "dark")
    assert light[0] != dark[0]
    page.reload()
    page.wait_for_selector("html[data-scheme=light]")


def test_a_phone_does_not_scroll_sideways(visit: Callable[..., Any]) -> None:
    page = visit(viewport={"width": 390, "height": 844})
    page.wait_for_selector("#value:not(:empty)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    playwright.expect(page.locator("#side")).not_to_be_visible()
    page.locator("#menu").click()
    playwright.expect(page.locator("#side")).to_be_visible()
    page.locator(".run").nth(1).click()
    text_of(page, "#focused", "post_ln")
    playwright.expect(page.locator("#side")).not_to_be_visible()


def test_an_empty_folder_shows_how_to_record_and_then_the_run(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit(url=url)
        playwright.expect(page.get_by_text("No runs yet")).to_be_visible()
        text_of(page, "#empty pre", "ks.watch(model")
        kit.write_run(tmp_path / "first.h5", "keel", layers=8, steps=5)
        playwright.expect(page.locator(".card")).to_have_count(1, timeout=WAIT)
        playwright.expect(page.get_by_text("No runs yet")).to_be_hidden()
        text_of(page, "#where", "sub-layer 2, step 40 · first")
        page.close()


def test_a_live_run_is_followed_until_the_user_looks_back(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    rows = kit.rows_of("keel", 16, 60)
    writer = kit.RunWriter(tmp_path / "live.h5", kit.layout_of(16, planned=600))
    for row in rows[:5]:
        writer.append(row)
    writer.flush()
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit(url=url)
        text_of(page, "#where", "sub-layer 5, step 40 · live")
        text_of(page, "#pulse", "Live · step 40")
        text_of(page, "#follow", "Following")
        page.locator(".card").focus()
        for row in rows[5:20]:
            writer.append(row)
        writer.flush()
        text_of(page, "#where", "sub-layer 5, step 190 · live")
        page.wait_for_timeout(2500)  # a new verdict: the card is drawn anew under the keyboard focus
        assert page.evaluate("document.activeElement.className").startswith("card")
        click_at(page, "heatmap", 0.1, 0.5)
        text_of(page, "#follow", "Follow")
        held = page.locator("#where").inner_text()
        for row in rows[20:]:
            writer.append(row)
        writer.close()
        text_of(page, "#run-list", "Finished")
        assert page.locator("#where").inner_text() == held
        page.keyboard.press("f")
        text_of(page, "#where", "step 590")
        page.close()


def test_hostile_names_stay_text_and_broken_files_say_why(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    kit.write_run(tmp_path / "<img src=x onerror=alert(1)>.h5", "broken", layers=12, steps=40)
    (tmp_path / "note.h5").write_text("not a run")
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit(url=url)
        text_of(page, "#cards", "<img src=x onerror=alert(1)>")
        text_of(page, "#cards", "Non-finite")
        text_of(page, ".card.broken", "note.h5")
        assert page.locator("#cards img, #run-list img, #findings img").count() == 0
        click_at(page, "heatmap", 0.1, 0.1)
        text_of(page, "#value", "exactly 0")
        text_of(page, "#profile .notes", "4 layers exactly 0")
        page.close()


@pytest.mark.parametrize(("layers", "steps"), [(1, 1), (2000, 30)])
def test_any_depth_and_length_is_drawn(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path, layers: int, steps: int
) -> None:
    kit.write_run(tmp_path / "run.h5", "keel", layers=layers, steps=steps)
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit(url=url)
        click_at(page, "heatmap", 0.5, 0.01)
        text_of(page, "#where", "step")
        assert page.evaluate("keelscope.view.layer") <= 1 + layers // 90
        assert page.evaluate("document.querySelectorAll('*').length") < 2000
        page.close()


def test_a_long_run_is_pooled_and_exact_where_the_cursor_rests(
    visit: Callable[..., Any], kit: ModuleType, tmp_path: Path
) -> None:
    from keelscope.store.reader import open_run

    path = kit.write_run(tmp_path / "long.h5", "pre_ln", layers=4, steps=1501, every=1)
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit("?step=700&layer=2", url=url)
        text_of(page, "#pooled", "farthest of every 2 recorded steps")
        text_of(page, "#where", "sub-layer 2, step 700 · long")
        for name in ("profile", "history"):  # what is read where the cursor rests comes after the pooled values
            holds(page, f"!!keelscope.view.exact('{name}', keelscope.view.runs[0])")
        shown = page.evaluate("10 ** keelscope.view.exact('profile', keelscope.view.runs[0]).levels[1]")
        with open_run(path) as run:
            assert shown == pytest.approx(run["gradients/rms"].of("sublayers.1").at(700)[0], rel=1e-5)
        assert page.evaluate("keelscope.view.exact('history', keelscope.view.runs[0]).first.length") == 751
        page.close()


def test_a_lost_server_is_said_and_the_data_stay(visit: Callable[..., Any], kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "run.h5", "keel", layers=8, steps=5)
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        page = visit(url=url)
        text_of(page, "#where", "sub-layer 2, step 40 · run")
        page.route("**/api/v1/state", lambda route: route.fulfill(status=503, body=""))
        text_of(page, "#banner", "Connection to keelscope lost")
        text_of(page, "#where", "sub-layer 2, step 40 · run")
        page.unroute("**/api/v1/state")
        playwright.expect(page.locator("#banner")).to_be_hidden(timeout=WAIT)
        page.close()


def test_of_many_runs_some_are_found_and_drawn(visit: Callable[..., Any], kit: ModuleType, tmp_path: Path) -> None:
    first = kit.write_run(tmp_path / "sweep-00.h5", "keel", layers=4, steps=3)
    for i in range(1, 30):
        shutil.copy(first, tmp_path / f"sweep-{i:02}.h5")
    with kit.served(tmp_path) as app, kit.at_port(app) as url:
        app.judged()
        page = visit(url=url, lost=True)
        playwright.expect(page.locator(".card")).to_have_count(6)
        page.keyboard.press("/")
        page.keyboard.type("1 SWEEP")
        text_of(page, ".picked", "12 of 30")
        playwright.expect(page.locator("#run-list li:visible")).to_have_count(12)
        page.locator("#draw-these").click()
        playwright.expect(page.locator(".card")).to_have_count(8)
        page.wait_for_url("**runs=sweep-01,sweep-10,sweep-11,**")
