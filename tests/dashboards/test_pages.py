"""What the pages hold: their blocks against the series, the reports and the comparison they are drawn from."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest

from keelscope.analysis.norm_gain import cumulative, shortcut_weights
from keelscope.diagnosis.report import compare, diagnose
from keelscope.store.reader import open_run
from keelscope_dashboards import pages
from keelscope_dashboards.asking import Choice, Option, Page, settled
from keelscope_dashboards.blocks import Axis, Chart, Line
from keelscope_dashboards.wording import typeset

NAMES = [page.name for page in pages.PAGES if page.build is not None]


def ids(app: Any) -> dict[str, str]:
    return {run["name"]: run["id"] for run in app.client.get("/api/v1/state").json["runs"]}


def ask(
    kit: ModuleType, app: Any, page: str, run: str, *others: str, **choices: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Blocks with their arrays in place, and what is chosen."""
    known = ids(app)
    query = {"run": known[run], "runs": ",".join(known[name] for name in (run, *others)), **choices}
    answer = app.client.get(f"/api/v1/pages/{page}?{urlencode(query)}")
    assert answer.status_code == 200, answer.text
    header, arrays = kit.unpack(answer.data)
    chosen = {choice["name"]: choice["chosen"] for choice in header["choices"]}
    return revived(header["blocks"], arrays), chosen


def revived(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [revived(one, arrays) for one in value]
    if not isinstance(value, dict):
        return value
    return arrays[value["$"]] if "$" in value else {name: revived(one, arrays) for name, one in value.items()}


def titled(blocks: list[Any], title: str) -> Any:
    return next(block for block in blocks if block.get("title", "").startswith(title))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("run", ["keel", "post_ln", "pre_ln", "with_paths"])
def test_every_page_says_something_of_every_run(kit: ModuleType, recorded: Any, name: str, run: str) -> None:
    blocks, _ = ask(kit, recorded, name, run, step=4, depth=3)
    assert blocks
    assert all(
        block["kind"] in {"chart", "heat", "table", "facts", "verdicts", "findings", "heading", "notice"}
        for block in blocks
    )


def test_the_depth_profile_is_the_row_of_the_series(kit: ModuleType, recorded: Any, recorded_folder: Path) -> None:
    blocks, chosen = ask(
        kit, recorded, "depth", "keel", series="gradients/rms,outputs/variance", at="now,first", step=7
    )
    assert chosen == {"series": ["gradients/rms", "outputs/variance"], "at": ["now", "first"], "scale": ["log"]}
    assert [block["title"] for block in blocks] == ["gradients/rms", "outputs/variance"]
    with open_run(recorded_folder / "keel.h5") as run:
        series = run["outputs/variance"].of("sublayers.?")
        expected = {step: np.log10(series.at(step)) for step in (0, 7)}
    first, now = blocks[1]["lines"]
    assert (first["label"], first["dash"], now["label"]) == ("keel · step 0", "dotted", "keel · step 7")
    np.testing.assert_allclose(first["y"], expected[0], rtol=1e-5)
    np.testing.assert_allclose(now["y"], expected[7], rtol=1e-5)
    np.testing.assert_array_equal(now["x"], np.arange(1, 9))


def test_a_nan_is_told_from_what_was_not_observed(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "broken.h5", "broken", layers=8, steps=32)
    with kit.served(tmp_path) as app:
        app.judged()
        for page, place in (("depth", [5.0]), ("layer", [300.0, 310.0])):
            blocks, _ = ask(kit, app, page, "broken", step=310, depth=5)
            lines = [line for block in blocks if block["kind"] == "chart" for line in block["lines"]]
            assert place in [line["bad"].tolist() for line in lines], page


def test_the_depth_profile_names_the_bands_of_one_equation(kit: ModuleType, recorded: Any) -> None:
    spans = ask(kit, recorded, "depth", "keel")[0][0]["spans"]
    assert [(span["start"], span["end"]) for span in spans] == [(0.5, 1.5), (1.5, 2.5), (2.5, 8.5)]
    assert spans[-1]["label"] == "n(a x + F(n x))"
    assert ask(kit, recorded, "depth", "post_ln")[0][0]["spans"] == []


def test_runs_of_unequal_depth_share_the_relative_axis(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "deep.h5", "keel", layers=20, steps=4)
    kit.write_run(tmp_path / "flat.h5", "keel", layers=5, steps=4)
    with kit.served(tmp_path) as app:
        (chart,), _ = ask(kit, app, "depth", "deep", "flat", at="now")
    assert (chart["x"]["kind"], chart["x"]["length"]) == ("relative", 20)
    np.testing.assert_allclose(chart["lines"][1]["x"], np.arange(1, 6) / 5)


def test_a_norm_of_each_part_is_a_line_of_its_own(kit: ModuleType, recorded: Any) -> None:
    (chart,), _ = ask(kit, recorded, "depth", "keel", series="norms/jacobian_gain", at="now")
    assert [line["label"].split(" · ")[1] for line in chart["lines"]] == ["branch_norm", "outer_norm"]
    assert [len(line["x"]) for line in chart["lines"]] == [8, 7]


def test_the_heatmap_offers_what_fits_the_series(kit: ModuleType, recorded: Any) -> None:
    blocks, chosen = ask(kit, recorded, "heatmap", "keel", "post_ln", of="all")
    assert [block["title"] for block in blocks] == ["keel", "post_ln"]
    assert chosen["against"] == ["output"]
    (block,), chosen = ask(kit, recorded, "heatmap", "keel", series="norms/jacobian_gain", scale="linear")
    assert (chosen["part"], chosen["against"]) == (["branch_norm"], [])
    assert (block["scale"], block["diverging"], block["part"]) == ("linear", False, "branch_norm")


def test_a_tile_of_any_series_and_part_is_that_series(kit: ModuleType, recorded: Any, recorded_folder: Path) -> None:
    path = f"/api/v1/runs/{ids(recorded)['keel']}/tile?panel=norms/jacobian_gain&scale=linear&part=outer_norm"
    header, arrays = kit.unpack(recorded.client.get(path).data)
    with open_run(recorded_folder / "keel.h5") as run:
        truth = run["norms/jacobian_gain"].of("*.outer_norm").values
    assert header["depths"] == list(range(2, 9))
    np.testing.assert_allclose(arrays["codes"] * header["unit"], truth, atol=header["unit"])


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("panel=gradients/nothing", 404),
        ("panel=scalars/loss", 404),
        ("panel=norms/jacobian_gain_quantile", 200),
        ("panel=norms/jacobian_gain_quantile&part=quantile 10 %25", 200),
        ("panel=norms/jacobian_gain&part=nothing", 404),
        ("panel=gradients/rms&scale=cubic", 400),
        ("panel=gradients/rms&reference=moon", 400),
        ("panel=gradients/rms&reference=median", 200),
    ],
)
def test_only_series_over_sites_are_tiles(recorded: Any, query: str, status: int) -> None:
    assert recorded.client.get(f"/api/v1/runs/{ids(recorded)['keel']}/tile?{query}").status_code == status


def test_a_single_layer_shows_every_statistic_over_steps(kit: ModuleType, recorded: Any, recorded_folder: Path) -> None:
    blocks, _ = ask(kit, recorded, "layer", "post_ln", depth=5)
    heading = titled(blocks, "Gradients")
    assert heading["note"] == "sublayers.4 · always zero_fraction 0, nonfinite_count 0, late_token_zero_fraction 0"
    assert all(block["title"] != "nonfinite_count" for block in blocks)
    with open_run(recorded_folder / "post_ln.h5") as run:
        rms, gain = run["gradients/rms"].of("sublayers.4").values[:, 0], run["norms/gamma_rms"].of("*.4.norm")
    chart = blocks[blocks.index(heading) + 2]
    assert chart["title"] == "rms"
    np.testing.assert_allclose(chart["lines"][0]["y"], np.log10(rms) if chart["y"]["log"] else rms, rtol=1e-5)
    np.testing.assert_allclose(titled(blocks, "gamma_rms")["lines"][0]["y"], gain.values[:, 0], rtol=1e-5)
    np.testing.assert_array_equal(titled(blocks, "gamma_rms")["lines"][0]["x"], gain.steps)


def test_a_layer_of_a_long_run_comes_in_parts(kit: ModuleType, recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = ask(kit, recorded, "layer", "keel", depth=2)
    assert not any(block.get("pending") for block in whole)
    monkeypatch.setattr(pages.layer, "BUDGET_SECONDS", -1.0)
    part, _ = ask(kit, recorded, "layer", "keel", depth=2)
    assert [block["kind"] for block in part] == ["heading", "chart", "notice"]
    assert part[-1]["pending"]


def test_curves_are_the_scalars_over_steps_tokens_or_time(
    kit: ModuleType, recorded: Any, recorded_folder: Path
) -> None:
    with open_run(recorded_folder / "keel.h5") as run:
        loss, tokens, seconds = (run[f"scalars/{name}"].values for name in ("loss", "tokens", "wall_time"))
    for over, x in (("step", np.arange(12)), ("tokens", tokens), ("wall_time", seconds)):
        blocks, _ = ask(kit, recorded, "curves", "keel", over=over, scale="linear")
        line = titled(blocks, "loss")["lines"][0]
        np.testing.assert_allclose(line["x"], x)
        np.testing.assert_allclose(line["y"], loss)
        assert over not in [block["title"] for block in blocks]


def test_diagnostics_hold_every_finding_and_the_coverage(kit: ModuleType, tmp_path: Path) -> None:
    path = kit.write_run(tmp_path / "broken.h5", "broken", layers=9, steps=40)
    with kit.served(tmp_path) as app, open_run(path) as run:
        app.judged()
        blocks, _ = ask(kit, app, "diagnostics", "broken")
        report = diagnose(run)
        errors, _ = ask(kit, app, "diagnostics", "broken", least="error")
    shown = next(block for block in blocks if block["kind"] == "findings")["items"]
    assert sorted(item["statement"] for item in shown) == sorted(typeset(one.statement) for one in report.findings)
    assert all(item["remedy"] and dict(item["evidence"])["Rule"] for item in shown)
    assert blocks[0]["items"][0]["pill"][0].lower() == report.headline
    kept = next(block for block in errors if block["kind"] == "findings")["items"]
    assert {item["severity"] for item in kept} == {"error"}


def test_coverage_counts_every_module_and_parameter(kit: ModuleType, recorded: Any, recorded_folder: Path) -> None:
    blocks, _ = ask(kit, recorded, "diagnostics", "keel", "post_ln")
    table = titled(blocks, "Coverage")
    with open_run(recorded_folder / "post_ln.h5") as run:
        total = len(run.coverage)
    column = table["head"].index("post_ln")
    assert sum(int(row[column].replace(",", "")) for row in table["rows"]) == total


def test_compare_is_the_comparison(kit: ModuleType, recorded: Any, recorded_folder: Path) -> None:
    blocks, _ = ask(kit, recorded, "compare", "keel", "post_ln", "pre_ln", of="whole")
    runs = [open_run(recorded_folder / f"{name}.h5") for name in ("keel", "post_ln", "pre_ln")]
    together = compare(runs, bins=128)
    for run in runs:
        run.close()
    for line, levels in zip(titled(blocks, "Output-gradient")["lines"], together.gradient.levels, strict=True):
        np.testing.assert_allclose(line["y"], levels)
    headlines = titled(blocks, "Verdicts side by side")["rows"][0]
    assert headlines == ["Headline", *(report.headline for report in together.reports)]
    assert [row[0] for row in titled(blocks, "What differs")["rows"]] == ["parameters", "scheme"]


def test_one_run_alone_is_not_compared(kit: ModuleType, recorded: Any) -> None:
    blocks, _ = ask(kit, recorded, "compare", "keel")
    assert blocks[0]["kind"] == "notice"
    assert "at least two runs" in blocks[0]["sentence"]


def test_about_tells_structure_and_recording(kit: ModuleType, recorded: Any) -> None:
    blocks, _ = ask(kit, recorded, "about", "keel")
    rows = titled(blocks, "Residual sub-layers")["rows"]
    assert [row[0] for row in rows] == ["1", "2", "3 to 8"]
    assert rows[2][1:3] == ["n(a x + F(n x))", "8"]
    assert rows[2][5] == "sublayers.*.outer_norm"
    assert dict(titled(blocks, "Configuration")["pairs"])["scheme"] == "keel"
    assert [row[0] for row in titled(blocks, "What was recorded")["rows"]][:2] == ["outputs", "gradients"]


def test_the_norm_gain_multiplies_along_the_shortcut(kit: ModuleType, recorded: Any, recorded_folder: Path) -> None:
    with open_run(recorded_folder / "keel.h5") as run:
        gains = run["norms/jacobian_gain"].of("*.outer_norm")
        weights = shortcut_weights(run.info.sublayers)
    row, factor = gains.at(10), np.array([weights[path] for path in gains.paths])
    for weight, scale in (("in", factor), ("out", np.ones(7))):
        blocks, _ = ask(kit, recorded, "gain", "keel", weight=weight, step=11)
        each, product = blocks[0], titled(blocks, "Shortcuts only, estimated")
        np.testing.assert_allclose(each["lines"][0]["y"], np.log10(scale * row), rtol=1e-4)
        np.testing.assert_allclose(product["lines"][0]["y"], cumulative(scale * row), rtol=1e-4)
        assert (each["lines"][0]["low"] <= each["lines"][0]["high"]).all()


def test_without_a_norm_on_the_shortcut_nothing_is_multiplied(kit: ModuleType, recorded: Any) -> None:
    blocks, _ = ask(kit, recorded, "gain", "pre_ln")
    assert blocks[0]["title"] == "No norm lies on the shortcut"
    assert all("estimated" not in block["title"] for block in blocks)
    branches, _ = ask(kit, recorded, "gain", "pre_ln", norms="branch")
    assert len(branches[0]["lines"][0]["x"]) == 8


def test_paths_draw_parts_gradients_and_the_predicted_product(
    kit: ModuleType, recorded: Any, recorded_folder: Path
) -> None:
    blocks, _ = ask(kit, recorded, "paths", "with_paths", step=30)
    with open_run(recorded_folder / "with_paths.h5") as run:
        row = {name: run[f"sublayers/{name}"].at(30) for name in kit.SUBLAYER_STATISTICS}
    parts = titled(blocks, "Shortcut and branch")["lines"]
    np.testing.assert_allclose(parts[0]["y"], np.log10(row["shortcut_part"]), rtol=1e-5)
    np.testing.assert_allclose(parts[1]["y"], np.log10(row["branch_part"]), rtol=1e-5)
    measured, predicted = titled(blocks, "Shortcuts only, estimated")["lines"]
    np.testing.assert_allclose(measured["y"], cumulative(row["shortcut_gain"]), rtol=1e-5)
    np.testing.assert_allclose(predicted["y"], -np.cumsum(row["predicted_slope"][::-1])[::-1], rtol=1e-5)
    np.testing.assert_allclose(titled(blocks, "Agreement")["lines"][0]["y"], row["path_cosine"], rtol=1e-5)


def test_gates_draw_the_band_and_mark_a_dead_gradient(kit: ModuleType, recorded: Any, recorded_folder: Path) -> None:
    blocks, _ = ask(kit, recorded, "gates", "with_paths", step=10)
    with open_run(recorded_folder / "with_paths.h5") as run:
        value, minimum = run["gates/value"].at(10), run["gates/minimum"].at(10)
    line = titled(blocks, "Value of every gate")["lines"][0]
    np.testing.assert_allclose(line["y"], value, rtol=1e-5)
    np.testing.assert_allclose(line["low"], minimum, rtol=1e-5)
    assert np.isneginf(titled(blocks, "Gradient of every gate")["lines"][0]["y"][2])
    assert titled(blocks, "Gates of")["rows"][2][0] == "sublayers.2.alpha"


@pytest.mark.parametrize(("page", "group"), [("paths", "sublayers"), ("gates", "gates"), ("gain", "norms")])
def test_a_missing_group_is_said_with_the_line_that_records_it(
    kit: ModuleType, three_runs: Any, page: str, group: str
) -> None:
    (notice,), _ = ask(kit, three_runs, page, "keel")
    assert notice["kind"] == "notice"
    assert f'probes=["default", "{group}"]' in notice["code"]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("depth?run={id}", 200),
        ("depth?run={id}&series=none&at=never&scale=&step=-9&depth=999999&nonsense=1", 200),
        ("layer?run={id}&depth=999999&group=none", 200),
        ("depth?run={id}&step=x", 400),
        ("depth", 404),
        ("depth?run=nobody", 404),
        ("depth?run={id}&runs={id},nobody", 404),
        ("overview?run={id}", 404),
        ("nothing?run={id}", 404),
        ("..%2fdepth?run={id}", 404),
    ],
)
def test_a_page_is_answered_for_known_names_and_ids_only(three_runs: Any, query: str, status: int) -> None:
    path = f"/api/v1/pages/{query}".format(id=ids(three_runs)["keel"])
    assert three_runs.client.get(path).status_code == status


def test_pages_have_addresses_and_everything_else_has_none(three_runs: Any) -> None:
    assert [three_runs.client.get(f"/{name}").status_code for name in NAMES] == [200] * len(NAMES)
    assert "Norm gain" in three_runs.client.get("/gain").text
    for path in ("/depth/1", "/Depth", "/depth.html"):
        assert three_runs.client.get(path).status_code == 404


def test_no_page_tells_where_the_files_lie(recorded: Any, recorded_folder: Path) -> None:
    for name in NAMES:
        answer = recorded.client.get(f"/api/v1/pages/{name}?run={ids(recorded)['keel']}")
        assert str(recorded_folder).encode() not in answer.data


def test_a_page_from_elsewhere_is_one_entry(kit: ModuleType, three_runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(question: Any) -> list[Any]:
        line = Line("steps", 0, np.array([0.0, 1.0]), np.array([1.0, float(question.step)]))
        return [Chart("Mine", Axis("step", "step"), Axis(), (line,))]

    mine = Page("mine", "Mine", "grid", "What is mine?", build)
    monkeypatch.setattr(pages, "PAGES", (*pages.PAGES, mine))
    (chart,), _ = ask(kit, three_runs, "mine", "keel", step=7)
    assert chart["lines"][0]["y"].tolist() == [1.0, 7.0]


def test_choices_are_bent_to_what_there_is() -> None:
    choice = Choice("at", "", tuple(Option(value, "") for value in "abc"), ("b",), most=2)
    assert settled(choice, ["c", "x", "a", "b"]) == ("c", "a")
    assert settled(choice, []) == ("b",)
    assert settled(Choice("at", "", (Option("z", ""),), ("b",)), []) == ("z",)
    assert settled(Choice("at", "", (), ("b",)), ["b"]) == ()


COMPUTING = {
    "mean",
    "median",
    "nanmean",
    "nanmedian",
    "std",
    "var",
    "percentile",
    "quantile",
    "polyfit",
    "cumsum",
    "prod",
    "cumprod",
    "gradient",
    "diff",
    "sum",
}


def test_the_pages_compute_no_statistic() -> None:
    """They place and format what analysis and diagnosis give; a statistic of their own could differ from the report."""
    folder = Path(pages.__file__).parent
    called = {
        (path.name, node.func.attr)
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert len({name for name, _ in called}) > 8
    assert [pair for pair in called if pair[1] in COMPUTING] == []
