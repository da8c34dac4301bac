"""Rules on residual paths, norms and tokens: found where they should be, silent on healthy stacks."""

from __future__ import annotations

import numpy as np
import pytest

from keelscope.diagnosis import Severity, diagnose

HEALTHY = {
    "pre_ln": ({"depth": 64, "pre": True}, {}),
    "keel": ({"depth": 64, "pre": True, "post": True, "alpha": 64.0}, {"norm": True}),
    "keel, deep": ({"depth": 256, "pre": True, "post": True, "alpha": 256.0}, {"norm": True}),
    "deepnorm": ({"depth": 64, "post": True, "alpha": 2.83, "scale": 0.3}, {"norm": True}),
    "nearly convex": ({"depth": 64, "alpha": 0.99, "beta": 0.01}, {}),
    "small post_ln": ({"depth": 64, "post": True, "scale": 0.15}, {"norm": True}),
    "rezero": ({"depth": 64, "beta": 0.0}, {}),
    "layerscale": ({"depth": 64, "pre": True, "beta": 1e-5}, {}),
    "small embedding": ({"depth": 64, "pre": True, "post": True, "alpha": [1.0] + [64.0] * 63, "embedding": 0.02}, {}),
}
PATH_RULES = {"shortcut_attenuated", "residual_absorbed", "idle_depth", "norm_kills_gradient", "rank_collapse"}


def findings(run, rule):
    return [finding for finding in diagnose(run).findings if finding.rule == rule]


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", [0, 1])
def test_healthy_stacks_get_no_finding(stack, name, seed):
    model, run = HEALTHY[name]
    found = {finding.rule for finding in diagnose(stack.recorded(stack.measure(**model, seed=seed), **run)).findings}
    assert found & PATH_RULES == set()


@pytest.mark.parametrize("depth", [64, 128])
def test_post_norms_attenuate_the_shortcut_and_are_no_headline(stack, depth):
    values = stack.measure(depth, post=True, width=32, scale=0.7)
    report = diagnose(stack.recorded(values, norm=True))
    assert report.headline == "flat"
    (finding,) = [f for f in report.findings if f.rule == "shortcut_attenuated"]
    carried = np.log10(values["shortcut_only_gradient"] / values["output_gradient"][-1])
    assert finding.value == pytest.approx(-carried[2])
    assert finding.severity is Severity.WARNING
    assert len(finding.sites) == (carried < -2).sum()
    assert f"over {depth - 2} sub-layers: post-norms divide by sqrt(1 + v), v = " in finding.statement


def test_few_layers_need_no_shortcut(stack):
    values = stack.measure(16, post=True, width=32, scale=3.0)
    (finding,) = findings(stack.recorded(values, norm=True), "shortcut_attenuated")
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(("weight", "found"), [(0.93, True), (0.95, False)])
def test_the_limit_is_two_decades(stack, weight, found):
    values = stack.measure(66, alpha=weight, beta=0.05)
    (lost,) = {round(float(-64 * np.log10(weight)), 9)}
    assert (lost > 2) is found
    assert bool(findings(stack.recorded(values), "shortcut_attenuated")) is found


def test_a_cut_shortcut_is_attenuated_and_named(stack):
    values = stack.measure(32, alpha=[1.0] * 10 + [0.0] + [1.0] * 21)
    (finding,) = findings(stack.recorded(values), "shortcut_attenuated")
    assert finding.value == np.inf
    assert "loses everything over 30 sub-layers: exactly nothing passes layers.5.branch0." in finding.statement


def test_a_first_block_that_differs_by_design_is_left_out(stack):
    values = stack.measure(64, pre=True, post=True, alpha=[1e-4, 1.0] + [64.0] * 62)
    assert findings(stack.recorded(values, norm=True), "shortcut_attenuated") == []


def bfloat16(x):
    """Round to nearest even with 8 bits of mantissa."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


@pytest.mark.parametrize(
    ("alpha", "rounded", "found"),
    [(64, bfloat16, False), (256, bfloat16, True), (1024, bfloat16, True), (1024, np.float32, False)],
)
def test_branches_absorbed_by_rounding(stack, alpha, rounded, found):
    rng = np.random.default_rng(0)
    values = stack.measure(16, pre=True, post=True, alpha=float(alpha))
    x, branch = rounded(rng.normal(size=(16, 4096))), rounded(0.65 * rng.normal(size=(16, 4096)))
    shortcut = rounded(np.float32(alpha) * x)
    values["absorbed_fraction"] = ((rounded(shortcut + branch) == shortcut) & (branch != 0)).mean(axis=1)
    hits = findings(stack.recorded(values, norm=True), "residual_absorbed")
    assert bool(hits) is found
    if found:
        assert hits[0].value == pytest.approx(np.median(values["absorbed_fraction"]))
        assert "in 16 of 16 sub-layers" in hits[0].statement


def test_absorption_in_a_few_sublayers_is_none(stack):
    values = stack.measure(16, pre=True)
    values["absorbed_fraction"][:4] = 0.9
    assert findings(stack.recorded(values), "residual_absorbed") == []


@pytest.mark.parametrize(("weight", "found"), [(1e-6, False), (1e-4, True)])
def test_a_branch_that_starts_closed_is_not_absorbed(stack, weight, found):
    """LayerScale of 1e-6 adds less than float32 resolves, which is how it starts; 1e-4 is lost in bfloat16 only."""
    values = stack.measure(16, pre=True)
    values["branch_gain"] = values["branch_gain"] * 0 + weight**2
    values["absorbed_fraction"] = values["branch_gain"] * 0 + 0.9
    assert bool(findings(stack.recorded(values), "residual_absorbed")) is found


@pytest.mark.parametrize(("share", "cosine", "many", "found"), [
    (0.003, -0.95, 20, True), (0.03, -0.95, 20, False), (0.003, 0.5, 20, False), (0.003, 0.95, 10, False),
])  # fmt: skip
def test_idle_depth_is_small_and_aligned_and_common(stack, share, cosine, many, found):
    values = stack.measure(64, pre=True, alpha=2.0)
    values["branch_gain"][-many:] = (2.0 * share) ** 2
    values["cosine"][-many:] = cosine
    hits = findings(stack.recorded(values), "idle_depth")
    assert bool(hits) is found
    if found:
        assert hits[0].value == pytest.approx(share)
        assert len(hits[0].sites) == many


def test_a_norm_over_two_features_kills_the_gradient(stack):
    norms = {"layers.0.norm0": {"jacobian_gain": 8.9e-4, "input_rms": 0.55, "gamma_rms": 1.0, "epsilon_share": 1e-4}}
    norms["layers.1.norm0"] = {"jacobian_gain": 1 / 64, "input_rms": 64.0, "gamma_rms": 1.0, "epsilon_share": 1e-9}
    norms["layers.2.norm0"] = {"jacobian_gain": 316.0, "input_rms": 1e-6, "gamma_rms": 1.0, "epsilon_share": 0.99}
    (finding,) = findings(stack.recorded(stack.measure(8), norms=norms), "norm_kills_gradient")
    assert (finding.sites, finding.severity) == (("layers.0.norm0",), Severity.ERROR)
    assert finding.value == pytest.approx(4.895e-4)


def test_the_kept_share_of_norms_is_what_the_rule_says(stack):
    for width, expected in ((2, 0.0), (3, 0.58), (256, 0.996)):
        x = np.random.default_rng(0).normal(size=width)
        x -= x.mean()
        projector = np.eye(width) - 1 / width - np.outer(x, x) / (x @ x)
        assert np.linalg.norm(projector) / np.sqrt(width) == pytest.approx(expected, abs=0.01)


def test_a_norm_whose_input_explodes(stack):
    norms = {f"layers.{i}.norm0": {"jacobian_gain": 1.0, "input_rms": 1.0, "gamma_rms": 1.0} for i in range(4)}
    norms |= {f"layers.{i}.norm1": {"jacobian_gain": 1e-3, "input_rms": 1e3, "gamma_rms": 1.0} for i in range(4)}
    assert findings(stack.recorded(stack.measure(8), norms=norms), "norm_kills_gradient") == []
    norms["layers.3.norm0"] = {"jacobian_gain": 1e-3, "input_rms": 1e3, "gamma_rms": 1.0}
    (finding,) = findings(stack.recorded(stack.measure(8), norms=norms), "norm_kills_gradient")
    assert (finding.sites, finding.severity) == (("layers.3.norm0",), Severity.WARNING)
    assert finding.value == pytest.approx(1e-3)


def test_a_branch_that_swamps_the_stream(stack):
    values = stack.measure(16, post=True, beta=[1.0] * 9 + [30.0] + [1.0] * 6)
    (finding,) = findings(stack.recorded(values, norm=True), "norm_kills_gradient")
    assert finding.sites == ("layers.4.branch1",)
    assert finding.value == pytest.approx(values["predicted_slope"][9])


@pytest.mark.parametrize(("top", "bottom", "found"), [(0.9999, 0.1, True), (0.95, 0.1, False), (0.9999, 0.95, False)])
def test_rank_collapse(stack, top, bottom, found):
    values = stack.measure(16, post=True, scale=0.2)
    hits = findings(stack.recorded(values, norm=True, tokens=np.linspace(bottom, top, 8)), "rank_collapse")
    assert bool(hits) is found
    if found:
        assert hits[0].value == pytest.approx(top)
        assert hits[0].sites == ("layers.7", "layers.7")
