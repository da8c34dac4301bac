"""Schemes that place norms elsewhere: branch_norms and mixed_norms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keelscope import models


def test_sub_ln_equation_and_init(run, rms):
    model, logits, x = run("sub_ln", lambda _, x, F: x + F(rms(x)))
    torch.testing.assert_close(logits, model.head(rms(x)))
    plain = models.build("pre_ln", depth=6, width=16, heads=2).double()
    factor = np.sqrt(np.log(6))
    for index, name, expected in [(2, "query", 1), (2, "value", factor), (3, "hidden", factor), (3, "output", factor)]:
        ours, base = (m.sublayers[index].branch.get_submodule(name).weight for m in (model, plain))
        torch.testing.assert_close(ours, expected * base, rtol=1e-5, atol=1e-7)
    attention, feed_forward = model.sublayers[2].branch, model.sublayers[3].branch
    assert attention.inner_norm.weight.shape == (16,)
    assert feed_forward.inner_norm.weight.shape == (64,)


def test_sub_ln_leaves_swiglu_unscaled():
    ours, plain = (models.build(s, depth=6, feed_forward="swiglu") for s in ("sub_ln", "pre_ln"))
    assert torch.equal(ours.sublayers[3].branch.gate.weight, plain.sublayers[3].branch.gate.weight)


@pytest.mark.parametrize("residual_scale", [False, True])
def test_normformer_equation(run, rms, residual_scale):
    def prepare(model):
        for sublayer in model.sublayers:
            if sublayer.residual_scale is not None:
                sublayer.residual_scale.data.fill_(0.5)

    def formula(index, x, F):
        if index % 2 == 0:
            return x + rms(F(rms(x)))
        return (0.5 if residual_scale else 1.0) * x + F(rms(x))

    model, logits, x = run("normformer", formula, prepare=prepare, residual_scale=residual_scale)
    torch.testing.assert_close(logits, model.head(rms(x)))
    assert model.sublayers[1].branch.inner_norm.weight.shape == (64,)


def test_normformer_scales_each_head():
    scale = models.build("normformer", depth=2, width=8, heads=2).sublayers[0].branch.inner_norm
    scale.scale.data = torch.tensor([2.0, 3.0])
    assert scale(torch.ones(1, 1, 8)).tolist() == [[[2.0] * 4 + [3.0] * 4]]


def test_sandwich_and_peri_equation(run, rms):
    model, logits, x = run("sandwich_ln", lambda _, x, F: x + rms(F(rms(x))))
    torch.testing.assert_close(logits, model.head(rms(x)))
    model, logits, x = run("peri_ln", lambda _, x, F: x + rms(F(rms(x))), start=rms)
    torch.testing.assert_close(logits, model.head(rms(x)))


def test_dyt_equation(run):
    def squash(slope, x):
        return torch.tanh(slope * x)

    model, logits, x = run("dyt", lambda i, x, F: x + F(squash((0.8, 0.2)[i % 2], x)), attention_slope=0.8, slope=0.2)
    torch.testing.assert_close(logits, model.head(squash(0.2, x)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_mix_ln_equation(run, rms, share):
    posts = {0.0: 0, 0.25: 1, 0.5: 2, 1.0: 4}[share]

    def formula(index, x, F):
        return rms(x + F(x)) if index < 2 * posts else x + F(rms(x))

    model, logits, x = run("mix_ln", formula, depth=8, post_share=share)
    torch.testing.assert_close(logits, model.head(rms(x)))


@pytest.mark.parametrize("star", [False, True])
def test_hybrid_norm_equation(run, rms, star):
    def formula(index, x, F):
        if star and index < 2:
            return x + F(rms(x))
        return x + F(x) if index % 2 == 0 else rms(x) + F(rms(x))

    model, logits, x = run("hybrid_norm", formula, star=star)
    torch.testing.assert_close(logits, model.head(rms(x)))
    attention = model.sublayers[0].branch
    assert {n.weight.shape for n in (attention.query_norm, attention.key_norm, attention.value_norm)} == {(8,)}


# Gradient flow. Measured values and margins: residual-scheme reference, with unit gain unless said.


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("depth", [16, 64])
def test_sub_ln_power_follows_its_law(flow, depth, seed):
    assert flow("sub_ln", depth=depth, seed=seed).power[-1] == pytest.approx(1 + depth * np.log(depth), rel=0.15)


@pytest.mark.parametrize("scheme", ["sub_ln", "normformer", "sandwich_ln", "peri_ln"])
def test_pre_ln_relatives_are_nearly_flat(flow, shortcut_slope, scheme):
    measured = flow(scheme, depth=64)
    assert -0.02 < measured.slope("late") < 0
    assert -0.02 < measured.slope("whole") < 0
    assert abs(shortcut_slope(scheme, depth=64)) < 1e-9


@pytest.mark.parametrize("init", ["unit_gain", "normal", "torch"])
@pytest.mark.parametrize("scheme", ["sandwich_ln", "peri_ln"])
def test_norms_on_branches_fix_the_power_whatever_the_init(flow, scheme, init):
    measured = [flow(scheme, depth=64, init=init, seed=seed).power for seed in range(4)]
    grown = np.mean([power[-1] for power in measured])
    assert grown == pytest.approx(64 + np.mean([power[0] for power in measured]), rel=0.12)


def test_normformer_power_is_about_one_per_sublayer(flow):
    assert flow("normformer", depth=64).power[-1] == pytest.approx(65, rel=0.12)


def test_peri_ln_gradients_fall_as_the_root_of_depth(fall_per_four):
    assert 1.6 < fall_per_four("peri_ln") < 2.4


def test_dyt_power_grows_faster_than_depth_at_first(flow):
    power = [flow("dyt", depth=depth).power[-1] for depth in (16, 64, 256)]
    assert power == pytest.approx([2.2, 13, 92], rel=0.25)
    assert -0.03 < flow("dyt", depth=64).slope("whole") < 0


@pytest.mark.parametrize(("depth", "total"), [(16, 0.57), (64, 0.041), (256, 1.5e-7)])
def test_mix_ln_loses_the_shortcut_in_its_lower_quarter_only(shortcut_profile, depth, total):
    norms = shortcut_profile("mix_ln", depth=depth)
    posts = 2 * (depth // 8)
    assert norms[posts:] == pytest.approx(norms[-1], rel=1e-5)
    assert np.log10(norms[0] / norms[-1]) == pytest.approx(np.log10(total), rel=0.15, abs=0.05)


@pytest.mark.parametrize("depth", [16, 64])
def test_hybrid_norm_vanishes_almost_as_post_ln(flow, shortcut_slope, depth):
    assert shortcut_slope("hybrid_norm", depth=depth) < 1.05 * shortcut_slope("post_ln", depth=depth)
    assert 0.06 < shortcut_slope("hybrid_norm", depth=depth) < 0.105
    late = np.mean([flow("hybrid_norm", depth=depth, seed=seed).slope("late") for seed in (0, 1)])
    assert 0.015 < late < 0.07
