"""What is said about the hard cases on residual paths, gates and norms: the label they ask for, where, and no other."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest

import keelscope as ks
from keelscope.cli import list_command

HERE = Path(__file__).parent
LOAD = runpy.run_path(str(HERE / "facts.py"))["load"]
OPTIMIZERS = runpy.run_path(str(HERE / "adapter.py"))["optimizers_of"]
PROBES = {row["name"] for row in list_command.probes()}


def reports(name):
    """One report per step of a case, with every probe that explains gradients."""
    case = LOAD(HERE / "handed" / f"{name}.py")
    model, step = case.build()
    wanted = ["default", *sorted({"gates", "sublayers", "tokens"} & PROBES)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = ks.watch(model, optimizer=OPTIMIZERS(case, model, step), probes=wanted)
        for _ in range(getattr(case, "N_STEPS", 1)):
            step(model)
            watch.step()
        watch.close()
    return [ks.diagnose(watch.run, step=int(step)) for step in watch.run.steps], case


def sites_of(report, rule):
    return {site for finding in report.findings if finding.rule == rule for site in finding.sites}


@pytest.mark.parametrize(
    ("name", "rule", "sites"),
    [
        ("rezero_alpha", "zero_grad_by_init", {"0.f.weight", "1.f.weight"}),
        ("lora_b_zero", "zero_grad_by_init", {"A"}),
    ],
)
def test_zero_initialisation_is_said_at_step_0_and_over_at_step_1(name, rule, sites):
    (first, second), case = reports(name)
    assert sites_of(first, rule) == sites
    assert {f.rule for f in first.findings} <= {rule, "frozen"}
    assert {f.rule for f in second.findings} <= {"frozen"}
    assert set(case.EXPECT["diagnosis"]["not"]).isdisjoint({first.headline, second.headline})


def test_a_norm_over_two_features_kills_the_gradient():
    (report,), case = reports("ln_two_features")
    assert [(f.rule, f.sites) for f in report.findings] == [
        (case.EXPECT["diagnosis"]["label"], (case.EXPECT["diagnosis"]["where"],))
    ]


@pytest.mark.skipif("gates" not in PROBES, reason="needs the probe of gates")
def test_closed_gates_are_named_and_the_open_one_is_not():
    (report,), case = reports("gates_closed")
    expected = case.EXPECT["diagnosis"]["per_module"]
    closed = {site.partition(".")[0] for site in sites_of(report, "gate_closed")}
    assert closed == {block for block, label in expected.items() if label == "gate_closed"}
    assert report.headline != "vanishing"


@pytest.mark.skipif("tokens" not in PROBES, reason="needs the probe of tokens")
def test_collapsed_tokens_are_no_vanishing_gradient():
    (report,), case = reports("post_ln_24")
    assert "rank_collapse" in {f.rule for f in report.findings}
    assert {report.headline}.isdisjoint(case.EXPECT["diagnosis"]["not"])


@pytest.mark.parametrize("name", ["pre_ln_control", "conv_bias_before_bn", "ln_jacobian_affine"])
def test_healthy_models_get_nothing_but_notes(name):
    (report,), _ = reports(name)
    assert [str(f) for f in report.findings if f.severity > ks.diagnosis.Severity.INFO] == []
