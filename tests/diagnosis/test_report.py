from __future__ import annotations

import csv
import io
import json
import re

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope import plugins
from keelscope.diagnosis import Report, compare, diagnose
from keelscope.errors import UnknownNameError, UsageError
from keelscope.store.reader import open_run
from keelscope.store.schema import Row, RunLayout
from keelscope.store.writer import RunWriter

N = 32


def sloped(total, n=N):
    return 1e-4 * 10.0 ** (total / n * np.arange(-n + 1, 1.0))


@pytest.fixture
def odd(make_run):
    """A report with every kind of number in its table."""

    def edit(k, values, observed):
        values["gradients"]["rms"][3:6] = [0.0, np.nan, np.inf]
        values["gradients"]["nonfinite_count"][3:6] = [0, 2, 2]

    gradient = sloped(3)
    gradient[8] = np.nan
    return diagnose(make_run(gradient, late=np.log10(sloped(1)), edit=edit, title="odd | <run>"))


def test_json_is_strict_and_complete(odd):
    def refuse(text):
        raise AssertionError(f"{text} is not JSON")

    parsed = json.loads(odd.to_json(), parse_constant=refuse)
    assert parsed == json.loads(json.dumps(odd.to_dict(), allow_nan=False))
    assert parsed["headline"] == "non-finite"
    assert [layer["path"] for layer in parsed["layers"]] == [layer.path for layer in odd.layers]
    values = [layer["gradient_rms"] for layer in parsed["layers"]]
    assert values[3:6] == [0.0, "NaN", "Infinity"]
    assert values[9] is None
    depth = parsed["depth"]
    assert (depth["unit"], depth["length"], depth["layers"], depth["stack"]) == ("sub-layer", 32.0, 32, "layers")
    assert depth["paths"] == [f"layers.{i}" for i in range(N)]
    assert depth["values"] == list(range(1, N + 1))
    assert set(parsed["profiles"]) == {"gradients/rms", "gradients/late_token_level", "parameter_gradients/norm"}


def test_the_documented_keys_are_the_keys(odd):
    documented = re.findall(r"``(\w+)``", Report.to_dict.__doc__)
    assert set(odd.to_dict()) == set(documented)


def test_findings_in_json(make_run):
    (finding,) = diagnose(make_run(sloped(3.0))).to_dict()["findings"]
    assert (finding["rule"], finding["severity"], finding["steps"]) == ("vanishing", "error", [0, 0])
    assert finding["value"] == pytest.approx(3.0)
    assert finding["remedy"]


def test_csv_reads_back_exactly(odd):
    rows = list(csv.DictReader(io.StringIO(odd.to_csv())))
    assert len(rows) == len(odd.layers) == N + 2
    for row, layer in zip(rows, odd.layers, strict=True):
        assert row["path"] == layer.path
        value = float(row["gradient_rms"]) if row["gradient_rms"] else None
        np.testing.assert_equal(value, layer.gradient_rms)
    assert [row["gradient_rms"] for row in rows[3:6]] == ["0.0", "NaN", "Inf"]
    assert rows[9]["gradient_rms"] == ""


def test_markdown_has_verdict_findings_and_rows(make_run):
    text = diagnose(make_run(sloped(3.0), title="a|b")).to_markdown()
    assert text.startswith("## a\\|b: vanishing\n\nGradient RMS shrinks")
    assert "| error | vanishing | The gradient RMS shrinks" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert (
        len(
            {line.replace("\\|", "").count("|") for line in table if "vanishing" not in line and "severity" not in line}
        )
        <= 2
    )
    assert sum("| layers." in line for line in table) == N
    assert "- Depth is counted in sub-layers: 32 in 32 entries of Block." in text


def test_html_fragment_is_escaped_and_asks_for_nothing(odd):
    html = odd._repr_html_()
    assert "odd | &lt;run&gt;: non-finite" in html
    assert "<run>" not in html
    assert "<script" not in html
    assert "http" not in html
    assert html.count("<tr>") == 1 + len(odd.layers)


def test_without_a_renderer_to_html_says_what_is_missing(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(plugins, "load", lambda group: [])
    with pytest.raises(UsageError, match=r"No HTML renderer is installed \(entry point group keelscope.renderers\)"):
        diagnose(make_run(sloped(0))).to_html(tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


def test_a_renderer_gets_the_report(make_run, tmp_path, monkeypatch):
    report = diagnose(make_run(sloped(0)))
    offers = {"keelscope.renderers": [("p", lambda r: f"<p>{r.headline}</p>")]}
    monkeypatch.setattr(plugins, "load", offers.__getitem__)
    assert report.to_html(tmp_path / "r.html").read_text() == "<p>flat</p>"


def test_a_step_that_was_not_recorded(make_run):
    with pytest.raises(UnknownNameError, match="step 7 was not recorded; 3 steps are recorded, 0 to 20"):
        diagnose(make_run(np.ones((3, N))), step=7)


def test_reprs_are_short(make_run):
    report = diagnose(make_run(sloped(3.0)))
    assert repr(report) == "<Report run: vanishing; 1 findings, 34 layers>"
    assert repr(compare(report, report)) == "<Comparison of run (1), run (2)>"


def test_the_title_falls_back_to_the_model(make_run):
    assert diagnose(make_run(sloped(0), title="")).title == "Model"


def test_compare_takes_runs_reports_and_lists(make_run):
    run = make_run(sloped(0), title="a")
    report = diagnose(make_run(sloped(3), title="b"))
    for comparison in (compare(run, report), compare([run, report])):
        assert comparison.titles == ("a", "b")
        assert [r.headline for r in comparison.reports] == ["flat", "vanishing"]


@pytest.mark.parametrize("n", [0, 1, 9])
def test_compare_takes_two_to_eight(make_run, n):
    with pytest.raises(UsageError, match=f"{n} runs were given; a comparison takes 2 to 8"):
        compare([make_run(sloped(0))] * n)


def test_comparison_levels_and_json(make_run):
    late = np.log10(sloped(3))
    comparison = compare(make_run(sloped(0), title="a"), make_run(sloped(2), late=late, title="b"), bins=8)
    assert comparison.labels() == ["1-4", "5-8", "9-12", "13-16", "17-20", "21-24", "25-28", "29-32"]
    parsed = json.loads(comparison.to_json())
    assert parsed["axis"] == "depth"
    assert parsed["runs"][0]["gradient"] == pytest.approx([-4.0] * 8)
    assert parsed["runs"][0]["late_tokens"] == [None] * 8
    expected = [np.median(late[4 * b : 4 * b + 4]) for b in range(8)]
    assert parsed["runs"][1]["late_tokens"] == pytest.approx(expected)
    assert parsed["runs"][1]["total"]["gradients/late_token_level"] == pytest.approx(3.0)


def test_runs_of_different_depth_meet_on_relative_depth(make_run):
    comparison = compare(make_run(sloped(1)), make_run(sloped(1, 8)), bins=4)
    assert comparison.labels() == ["0-25 %", "25-50 %", "50-75 %", "75-100 %"]
    np.testing.assert_allclose(comparison.gradient.levels[0], comparison.gradient.levels[1], atol=0.15)


def test_comparison_markdown(make_run):
    text = compare(make_run(sloped(0), title="a"), make_run(sloped(3), title="b"), bins=2).to_markdown()
    assert "| b | vanishing | +3.00 | Gradient RMS shrinks" in text
    assert "| 1-16 | 1.00e-04 |" in text


def test_a_run_without_gradients_can_be_compared(make_run):
    empty = make_run(np.empty((0, N)), title="empty")
    comparison = compare(empty, make_run(sloped(0)))
    assert np.isnan(comparison.gradient.levels[0]).all()
    assert "empty" in str(comparison)


def test_the_notes_say_when_the_weights_were_measured(make_run):
    def edit(k, values, observed):
        if k % 10:
            del values["parameters"]

    late = diagnose(make_run(np.ones((13, 8)), edit=edit))
    assert late.weights_step == 100
    assert "Weights were measured at step 100, the last one with them up to the table's." in late.notes
    for report in (
        diagnose(make_run(np.ones((11, 8)), edit=edit)),
        diagnose(make_run(np.ones(8), groups=("gradients",))),
    ):
        assert not any("weights column" in note for note in report.notes)


def test_a_file_left_by_a_dead_writer_is_said_to_be(make_run, tmp_path):
    run = make_run(np.ones((7, 8)))
    layout = RunLayout(run.info, tuple(run.groups.values()), coverage=run.coverage)
    writer = RunWriter(tmp_path / "live.h5", layout)
    for k, step in enumerate(run.steps):
        values = {
            g: {s.name: run[f"{g}/{s.name}"].values[k] for s in spec.statistics} for g, spec in run.groups.items()
        }
        writer.append(Row(int(step), float(k), values))
    writer.flush()
    (tmp_path / "left.h5").write_bytes(writer.path.read_bytes())  # as if its writer had been killed now
    writer.close()
    for name, stopped in (("left.h5", True), ("live.h5", False)):
        with open_run(tmp_path / name) as opened:
            text = diagnose(opened).to_text(width=200)
            assert opened.stopped is stopped
            assert ("The recording process ended without closing the file; 7 rows were recovered." in text) is stopped


class Added(nn.Module):
    """x + F(x), as often as asked, with nothing before it."""

    def __init__(self, depth):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_first_block_without_a_shortcut_is_said():
    batch = torch.ones(4, 8)
    notes = ks.report(Added(8), batch, lambda output, _: output.square().mean()).notes
    assert "Depth is counted in sub-layers: 8 in 8 entries of Linear." in notes
    (structure,) = [note for note in notes if note.startswith("Residual structure: 7 x")]
    assert structure.endswith(
        "None is seen in blocks.0: what enters it needs no gradient, so that no shortcut leads back there."
    )
    notes = ks.report(nn.Sequential(nn.Linear(8, 8), Added(8)), batch, lambda output, _: output.square().mean()).notes
    assert any(note.startswith("Residual structure: 8 x") and note.endswith(").") for note in notes)
