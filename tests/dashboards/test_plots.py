"""The pictures of a report are of its numbers, and only those that it has."""

from __future__ import annotations

import re

import numpy as np
import pytest

import keelscope as ks
from keelscope_dashboards.plots import _profile_keys, _shortcut_curve, plots_section


def names(section):
    return re.findall(r"<h3>([^<]+)</h3>", section)


def test_a_recorded_run_has_them_all(kit):
    section = plots_section(ks.diagnose(kit.memory_run("post_ln", layers=16, steps=8)))
    assert names(section) == ["Over depth", "Layer by step", "Loss"]
    assert "late tokens, S +" in section


@pytest.mark.parametrize("scheme", ["post_ln", "keel"])
def test_shortcuts_are_those_of_the_attribution(scheme):
    from keelscope.models import build
    from keelscope.targets import resolve

    case = resolve(f"scheme:{scheme}?depth=8&width=16&heads=2")
    report = ks.report(build(scheme, depth=8, width=16, heads=2), case.batch, case.loss)
    curve = _shortcut_curve(report)
    np.testing.assert_array_equal(curve.y[:-1], report.paths.main.shortcut.carried)
    assert (curve.x[0], curve.x[-1], curve.y[-1]) == (0.0, report.axis.length, 0.0)
    assert names(plots_section(report)) == ["Over depth"]


def test_parameters_where_outputs_were_not_watched(kit):
    from keelscope.store.memory import MemoryWriter
    from keelscope.store.schema import Row, RunLayout

    layout = kit.layout_of(8)
    only = RunLayout(layout.info, layout.groups[2:])
    writer = MemoryWriter(only)
    writer.append(Row(0, 0.0, {"parameter_gradients": kit.rows_of("keel", 8, 1)[0].values["parameter_gradients"]}))
    report = ks.diagnose(writer.run())
    assert _profile_keys(report) == ["parameter_gradients/norm"]
    assert names(plots_section(report)) == ["Over depth"]
