"""One cause is one finding: what follows from it is named there and nowhere else."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import keelscope as ks
from keelscope.diagnosis import Severity

BENCHMARK = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "benchmark" / "collect.py")))
MODELS = {model.name: model for model in BENCHMARK.collect()}


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("gates that cannot open, seed 0", ["gate_dead", "saturated"]),
        ("gates at one, seed 0", ["zero_grad_by_init"]),
        ("branch multiplied by zero, seed 0", ["gate_dead"]),
        ("stream multiplied by zero, seed 0", ["zero_gradient"]),
        ("norm over one feature, seed 0", ["zero_gradient"]),
        ("dead relu layer (at 2), seed 0", ["dead_units"]),
        ("dead branch, seed 0", ["dead_units"]),
    ],
)
def test_each_cause_is_one_finding(name, rules):
    report = ks.diagnose(MODELS[name].record())
    assert [finding.rule for finding in report.findings] == rules
    assert report.headline != "dead" or "shortcut" not in report.explanation


def test_weights_above_a_dead_stream_are_named_with_it():
    (finding,) = ks.diagnose(MODELS["stream multiplied by zero, seed 0"].record()).findings
    assert finding.severity is Severity.ERROR
    assert finding.sites[-1] == "blocks.6.first.weight"
    assert ", and in 1 parameter (blocks.6.first.weight) of others; nearest the loss: blocks.5." in finding.statement
