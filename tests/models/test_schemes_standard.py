"""keel, post_ln and pre_ln: equations against plain formulas, gradient flow against the reference values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keelscope import models

TOKENS = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(0))


def layer(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.fixture(params=["rms", "layer"])
def norm(request, rms):
    return request.param, rms if request.param == "rms" else layer


def test_post_ln_equation(run, norm):
    name, n = norm
    model, logits, x = run("post_ln", lambda _, x, F: n(x + F(x)), norm=name)
    torch.testing.assert_close(logits, model.head(x))


def test_pre_ln_equation(run, norm):
    name, n = norm
    model, logits, x = run("pre_ln", lambda _, x, F: x + F(n(x)), norm=name)
    torch.testing.assert_close(logits, model.head(n(x)))


def keel(n, alpha, first_block):
    def formula(index, x, F):
        if first_block == "v1" and index in {0, 1}:
            return x + F(n(x))
        if first_block == "v2" and index == 0:
            return x + F(n(x))
        if first_block == "v2" and index == 1:
            return n(x + F(n(x)))
        return n(alpha * x + F(n(x)))

    return formula


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("alpha", [None, 3.5])
@pytest.mark.parametrize("first_block", ["v2", "v1", "none"])
def test_keel_equation(run, norm, first_block, alpha, learnable):
    name, n = norm
    formula = keel(n, 6.0 if alpha is None else alpha, first_block)
    options = {"alpha": alpha, "first_block": first_block, "alpha_learnable": learnable, "final_norm": True}
    model, logits, x = run("keel", formula, norm=name, **options)
    torch.testing.assert_close(logits, model.head(n(x)))


def test_keel_learns_alpha_only_when_asked_and_only_where_there_is_one():
    fixed = models.build("keel", depth=6)
    assert not [name for name, _ in fixed.named_parameters() if name.endswith("alpha")]
    learned = models.build("keel", depth=6, alpha_learnable=True)
    names = [name for name, _ in learned.named_parameters() if name.endswith("alpha")]
    assert names == [f"sublayers.{index}.alpha" for index in range(2, 6)]
    learned(TOKENS).logsumexp(-1).sum().backward()
    assert all(learned.get_parameter(name).grad.abs() > 0 for name in names)


def test_bfloat16_absorbs_branches_behind_a_large_alpha_and_float32_does_not():
    """Residual add in half precision: entries of the stream that do not change at all."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    branch = 0.65 * torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    unchanged = [
        (alpha * x.to(dtype) + branch.to(dtype) == alpha * x.to(dtype)).double().mean().item()
        for alpha, dtype in [(64, torch.bfloat16), (512, torch.bfloat16), (512, torch.float32)]
    ]
    assert unchanged == pytest.approx([0.17, 0.72, 0.0], abs=0.05)


# Gradient flow. Measured values and margins: residual-scheme reference, at depth 64 with unit gain.


@pytest.mark.parametrize("seed", [0, 1])
def test_linear_branches_give_the_textbook_rates(flow, shortcut_slope, seed):
    """With v = 1 the shortcut loses 1/2 log10 2 = 0.1505 per sub-layer, and the branches give all of it back."""
    options = {"depth": 64, "width": 128, "linear": True, "seed": seed}
    assert 0.13 < shortcut_slope("post_ln", **options) < 0.16
    assert abs(flow("post_ln", **options).slope("whole")) < 0.01


def test_linear_branches_add_one_to_the_power_of_pre_ln(flow):
    """In expectation over weights; log10 of 65 is 1.813."""
    power = [flow("pre_ln", depth=64, width=128, linear=True, seed=seed).power[-1] for seed in (0, 1)]
    assert np.log10(np.mean(power)) == pytest.approx(1.804, abs=0.05)


@pytest.mark.parametrize("seed", [0, 1])
def test_post_ln_vanishes_along_the_shortcut_by_the_law_of_the_branch_gain(flow, shortcut_slope, seed):
    slope = shortcut_slope("post_ln", depth=64, seed=seed)
    assert 0.09 < slope < 0.13
    gain = flow("post_ln", depth=64, seed=seed).branch_gain
    predicted = np.mean(0.5 * np.log10(1 + gain[6:58]))
    assert slope == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("depth", [16, 256])
def test_post_ln_shortcut_slope_hardly_depends_on_depth(shortcut_slope, depth):
    assert 0.08 < shortcut_slope("post_ln", depth=depth) < 0.13


@pytest.mark.parametrize("seed", [0, 1])
def test_post_ln_vanishes_at_late_tokens_while_the_whole_tensor_looks_flat(flow, seed):
    measured = flow("post_ln", depth=64, seed=seed)
    assert 0.05 < measured.slope("late") < 0.09
    assert abs(measured.slope("whole")) < 0.03
    assert measured.slope("first") < 0


def test_post_ln_late_token_slope_is_the_law_over_attention_only(flow):
    measured = flow("post_ln", depth=64)
    predicted = np.mean(0.5 * np.log10(1 + measured.branch_gain[6:58:2])) / 2
    assert measured.slope("late") == pytest.approx(predicted, rel=0.15)


def test_post_ln_with_small_weights_shows_nothing(flow):
    measured = flow("post_ln", depth=64, init="normal")
    assert abs(measured.slope("late")) < 1e-3
    assert abs(measured.slope("whole")) < 1e-3


def test_post_ln_top_parameter_gradient_hardly_depends_on_depth(flow):
    """Measured as in the reference, with learned positions: rotary ones leave tokens more alike in deep models. Pre-LN
    gives 4, Keel 16.
    """
    top = {
        depth: [flow("post_ln", depth=depth, seed=seed, positions="learned").top for seed in (0, 1)]
        for depth in (16, 256)
    }
    assert 0.7 < np.mean(top[16]) / np.mean(top[256]) < 1.4


@pytest.mark.parametrize(("init", "low", "high"), [("xavier", 0.08, 0.11), ("torch", 0.008, 0.014)])
def test_post_ln_slope_follows_the_init(shortcut_slope, init, low, high):
    assert low < shortcut_slope("post_ln", depth=64, init=init) < high


def test_post_ln_with_relu(flow, shortcut_slope):
    assert 0.09 < shortcut_slope("post_ln", depth=64, feed_forward="relu") < 0.13
    assert 0.05 < flow("post_ln", depth=64, feed_forward="relu").slope("late") < 0.09


@pytest.mark.parametrize("seed", [0, 1])
def test_pre_ln_is_nearly_flat_and_its_shortcut_exactly(flow, shortcut_slope, seed):
    assert abs(shortcut_slope("pre_ln", depth=64, seed=seed)) < 1e-9
    measured = flow("pre_ln", depth=64, seed=seed)
    assert -0.02 < measured.slope("late") < 0
    assert -0.02 < measured.slope("whole") < 0


@pytest.mark.parametrize("depth", [64, 256])
def test_pre_ln_power_grows_linearly(flow, depth):
    power = flow("pre_ln", depth=depth).power
    assert 0.4 < np.polyfit(np.arange(depth + 1), power, 1)[0] < 0.75


@pytest.mark.parametrize("seed", [0, 1])
def test_pre_ln_parameter_gradients_fall_as_the_root_of_depth(fall_per_four, seed):
    assert 1.6 < fall_per_four("pre_ln", seed=seed) < 2.4


@pytest.mark.parametrize("options", [{}, {"seed": 1}, {"feed_forward": "relu"}, {"norm": "layer"}, {"norm": "scale"}])
def test_keel_is_flat_in_every_profile(flow, shortcut_slope, options):
    measured = flow("keel", depth=64, **options)
    for name in ("whole", "late", "first"):
        assert abs(measured.slope(name, skip=2)) < 1e-3
    assert abs(shortcut_slope("keel", depth=64, skip=2, **options)) < 1e-3


@pytest.mark.parametrize("seed", [0, 1])
def test_keel_parameter_gradients_fall_with_depth_and_are_uniform_over_it(flow, fall_per_four, seed):
    assert 3.3 < fall_per_four("keel", seed=seed) < 4.8
    deep = flow("keel", depth=256, seed=seed).parameters[2::2]
    assert 0.8 < deep[:8].mean() / deep[-8:].mean() < 1.25


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("depth", [64, 256])
def test_keel_first_block_gets_gradients_in_proportion_to_depth(flow, depth, seed):
    gradients = flow("keel", depth=depth, seed=seed).parameters
    attention = gradients[0] / gradients[2::2].mean()
    feed_forward = gradients[1] / gradients[3::2].mean()
    assert 0.4 * depth < attention < 1.0 * depth
    assert 0.4 * depth < feed_forward < 1.0 * depth


def test_keel_without_first_block_exception_is_uniform(flow):
    gradients = flow("keel", depth=64, first_block="none").parameters
    assert 0.5 < gradients[0] / gradients[2::2].mean() < 1.5


def test_keel_with_alpha_one_vanishes_like_post_ln(flow):
    assert flow("keel", depth=64, alpha=1.0, first_block="none").slope("late") > 0.05
