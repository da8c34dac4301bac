"""Shortcut and branch gains of a run: its streams, the columns of the layer table, and every format."""

from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest

from keelscope.diagnosis import diagnose
from keelscope.diagnosis.evidence import Evidence
from keelscope.diagnosis.paths import paths_of

FORMATS = {
    "text": lambda report: " ".join(report.to_text(width=1000).split()),
    "markdown": lambda report: report.to_markdown(),
    "json": lambda report: report.to_json(),
    "html": lambda report: report._repr_html_(),
}


@pytest.fixture(scope="module")
def post(stack):
    return stack.measure(64, post=True, width=32, scale=0.6)


def test_a_run_without_the_group_has_no_paths(make_run):
    report = diagnose(make_run(np.ones(8)))
    assert (report.paths, report.explanation, report.to_dict()["paths"]) == (None, "", None)
    assert "shortcut" not in report.to_markdown() + report.to_text()


def test_the_streams_come_apart_the_longest_first(stack, post):
    streams = [1, 0, 0, 0] * 16
    paths = paths_of(Evidence(stack.recorded(post, streams=streams)))
    assert [(s.stream, len(s)) for s in paths.streams] == [(0, 48), (1, 16)]
    np.testing.assert_array_equal(paths.streams[1].values["alpha"], post["alpha"][::4])
    assert [site.path for site in paths.streams[1].sites[:2]] == ["layers.0.branch0", "layers.2.branch0"]


def test_the_embedding_end_is_measured(stack, post):
    values = {**post, "input_gradient": post["input_gradient"].copy()}
    run = stack.recorded(values)
    attribution = paths_of(Evidence(run)).main.attribution
    assert attribution.embedding == pytest.approx(0.0)
    assert sum(attribution.totals.values()) == pytest.approx(attribution.total)


def test_a_group_on_a_sparse_schedule_is_found_and_said(stack, post):
    run = stack.recorded(post, steps=range(0, 300, 10), skip={"sublayers": lambda step: step != 20})
    report = diagnose(run)
    assert report.paths.step == 20
    assert "Shortcut and branch gains were measured at step 20, the last one with them." in report.notes
    assert diagnose(run, step=10).paths is None


def test_columns_are_those_of_the_lowest_sublayer(stack, post):
    layers = {layer.path: layer for layer in diagnose(stack.recorded(post)).layers}
    expected = np.log10(post["shortcut_only_gradient"] / post["output_gradient"][-1])
    for block in (0, 13, 31):
        layer = layers[f"layers.{block}"]
        assert layer.shortcut_gain == pytest.approx(expected[2 * block])
        assert layer.branch_gain == pytest.approx(post["branch_gain"][2 * block : 2 * block + 2].mean())
    assert layers["embedding"].shortcut_gain is None


def test_norms_on_sums_go_before_others(stack, post):
    norms = {"layers.0.norm0": {"jacobian_gain": 0.5}, "layers.0.norm1": {"jacobian_gain": 0.125}}
    norms |= {"layers.0.inner": {"jacobian_gain": 100.0}, "layers.1.inner": {"jacobian_gain": 9.0}}
    summed = diagnose(stack.recorded(post, norms=norms, norm=True)).layers
    assert [layer.norm_gain for layer in summed[1:4]] == [pytest.approx(0.25), pytest.approx(9.0), None]
    others = diagnose(stack.recorded(post, norms=norms)).layers
    assert others[1].norm_gain == pytest.approx((0.5 * 0.125 * 100) ** (1 / 3))


def test_gates_are_shown_but_not_constants(stack, post):
    gates = {
        "layers.0.gate": ("gate (token)", [0], {"value": 0.2}),
        "layers.0.scale": ("learnable scalar", [1], {"value": 0.4}),
        "layers.1.alpha": ("constant", [2], {"value": 64.0}),
    }
    layers = diagnose(stack.recorded(post, gates=gates)).layers
    assert [layer.gate for layer in layers[1:3]] == [pytest.approx(0.3), None]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_the_explanation_and_the_columns(stack, post, form):
    report = diagnose(stack.recorded(post, gates={"layers.0.t": ("gate (token)", [0], {"value": 0.2})}))
    text = FORMATS[form](report)
    assert "The shortcut path loses" in text
    assert "gate" in text
    assert "shortcut" in text


def test_csv_has_every_column_in_full_precision(stack, post):
    report = diagnose(stack.recorded(post))
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [float(r["shortcut_gain"]) for r in rows[1:33]] == [layer.shortcut_gain for layer in report.layers[1:33]]
    assert {r["gate"] for r in rows} == {""}


def test_json_holds_totals_and_the_attribution_table(stack, post):
    parsed = json.loads(diagnose(stack.recorded(post)).to_json())["paths"]
    (stream,) = parsed["streams"]
    totals = stream["totals"]
    parts = ("norm", "scale", "branch", "other", "embedding")
    assert sum(totals[name] for name in parts) == pytest.approx(totals["total"], abs=1e-6)
    assert len(stream["attribution"]) == stream["sublayers"] == 64
    assert sum(row["norm"] for row in stream["attribution"]) == pytest.approx(totals["norm"])
    assert stream["shortcut"]["lost"] == pytest.approx(-stream["attribution"][0]["carried"])


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_terminal_width_is_kept(stack, post, width):
    gates = {f"layers.{i}.t": ("gate (token)", [2 * i], {"value": 0.2}) for i in range(32)}
    text = diagnose(stack.recorded(post, gates=gates)).to_text(width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "shortcut" in text
    assert "…" not in text
