from __future__ import annotations

import math

import numpy as np
import pytest

from keelscope.diagnosis import diagnose
from keelscope.store.memory import MemoryWriter
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, Stack, StatisticSpec


def by_path(report):
    return {layer.path: layer for layer in report.layers}


def test_rows_hold_the_values_of_the_reported_step(make_run):
    table = np.array([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    run = make_run(table, variance=2 * table, parameter=table / 10, late=np.log10(table * 5), sublayers=2)
    report = diagnose(run)
    row = by_path(report)["layers.1"]
    assert [layer.path for layer in report.layers] == ["embedding", *(f"layers.{i}" for i in range(4)), "head"]
    assert (row.depth, row.kind, row.role, row.stack) == (4.0, "Block", "layer", "layers")
    assert (row.output_variance, row.gradient_rms, row.ratio) == (40.0, 20.0, pytest.approx(20 / 30))
    assert row.late_token_gradient == pytest.approx(100.0)
    assert row.parameter_gradient_norm == pytest.approx(2.0)  # hypot(0.8, 0.6) * 20 / 10
    assert row.weight_norm == pytest.approx(math.sqrt(2))
    assert by_path(diagnose(run, step=0))["layers.1"].gradient_rms == 2.0


def test_zero_nan_inf_and_not_observed_stay_apart(make_run):
    def edit(k, values, observed):
        values["gradients"]["rms"][1:5] = [0.0, np.nan, np.inf, np.nan]
        values["gradients"]["nonfinite_count"][1:5] = [0, 3, 3, np.nan]

    row = by_path(diagnose(make_run([1.0, 1.0, 1.0, np.nan], edit=edit)))
    assert row["layers.0"].gradient_rms == 0.0
    assert math.isnan(row["layers.1"].gradient_rms)
    assert row["layers.2"].gradient_rms == math.inf
    assert row["layers.3"].gradient_rms is None
    assert row["layers.0"].late_token_gradient is None


def test_nan_parameter_gradients_are_observed_ones(make_run):
    def edit(k, values, observed):
        values["parameter_gradients"]["norm"][1] = np.nan
        values["parameter_gradients"]["norm"][3:5] = np.nan
        values["parameter_gradients"]["rms"][3:5] = np.nan
        observed["parameter_gradients"] = np.array([True] * 3 + [False] * 2 + [True] * 5)

    row = by_path(diagnose(make_run(np.ones(4), edit=edit)))
    assert math.isnan(row["layers.0"].parameter_gradient_norm)
    assert row["layers.1"].parameter_gradient_norm is None


def test_the_ratio_looks_past_rows_without_a_gradient(make_run):
    row = by_path(diagnose(make_run([1.0, np.nan, 4.0, 8.0])))
    assert row["layers.0"].ratio == pytest.approx(0.25)
    assert row["layers.1"].ratio is None
    assert row["head"].ratio is None


def test_a_ratio_over_zero_is_none(make_run):
    assert by_path(diagnose(make_run([1.0, 0.0, 1.0, 1.0])))["layers.0"].ratio is None


def test_every_parameter_is_counted_in_one_row():
    modules = (
        Site("", "ViT", numel=3),
        Site("patch", "Conv2d", numel=9),
        *(Site(f"h.{i}", "Block", "layer", "h", i) for i in range(4)),
    )
    names = ("cls", "patch.weight", *(f"h.{i}.mlp.{p}" for i in range(4) for p in ("w", "b")))
    parameters = tuple(Site(name, "Parameter", "parameter", numel=1) for name in names)
    spec = (StatisticSpec("norm", "1", ""),)
    groups = (GroupSpec("gradients", spec, modules), GroupSpec("parameter_gradients", spec, parameters))
    writer = MemoryWriter(RunLayout(RunInfo("t", "id", "2026", stacks=(Stack("h", "Block", 4),)), groups))
    norms = np.arange(1.0, 11.0)
    writer.append(Row(0, 0.0, {"gradients": {"norm": np.ones(6)}, "parameter_gradients": {"norm": norms}}))
    found = [layer.parameter_gradient_norm for layer in diagnose(writer.run()).layers]
    assert found[:2] == [1.0, 2.0]
    assert found[2] == pytest.approx(5.0)  # hypot(3, 4)
    assert sum(v**2 for v in found) == pytest.approx((norms**2).sum())


def test_tiny_norms_do_not_underflow_in_their_squares(make_run):
    row = by_path(diagnose(make_run(np.ones(4), parameter=np.full(4, 1e-200))))
    assert row["layers.2"].parameter_gradient_norm == pytest.approx(1e-200)


def test_a_tied_head_points_to_the_row_that_counts_it():
    modules = (
        Site("wte", "Embedding", numel=8),
        *(Site(f"h.{i}", "B", "layer", "h", i) for i in range(4)),
        Site("head", "Linear", numel=8),
    )
    parameters = (Site("wte.weight", "Parameter", "parameter", numel=8, aliases=("head.weight",)),)
    spec = (StatisticSpec("norm", "1", ""),)
    groups = (GroupSpec("gradients", spec, modules), GroupSpec("parameters", spec, parameters))
    writer = MemoryWriter(RunLayout(RunInfo("t", "id", "2026", stacks=(Stack("h", "B", 4),)), groups))
    writer.append(Row(0, 0.0, {"gradients": {"norm": np.ones(6)}, "parameters": {"norm": np.ones(1)}}))
    row = by_path(diagnose(writer.run()))
    assert (row["head"].tied_to, row["head"].weight_norm) == ("wte", None)
    assert (row["wte"].tied_to, row["wte"].weight_norm) == ("", 1.0)
    assert "tied" in str(diagnose(writer.run()))
