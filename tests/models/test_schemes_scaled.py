"""Schemes that scale branches or shortcuts: branch_scales, depth_scaling, highway and ngpt."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keelscope import models


def fill(name, value):
    """Set one parameter or attribute of every sub-layer, so that an equation is tested away from its start."""

    def prepare(model):
        for sublayer in model.sublayers:
            getattr(sublayer, name).data.fill_(value)

    return prepare


@pytest.mark.parametrize("scheme", ["rezero", "skipinit"])
def test_rezero_and_skipinit_equation(run, scheme):
    model, logits, x = run(scheme, lambda _, x, F: x + 0.3 * F(x), prepare=fill("alpha", 0.3))
    torch.testing.assert_close(logits, model.head(x))


def test_skipinit_starts_where_it_is_told(run):
    model, logits, x = run("skipinit", lambda _, x, F: x + 0.25 * F(x), alpha=0.25)
    torch.testing.assert_close(logits, model.head(x))


def test_layerscale_equation(run, rms):
    model, logits, x = run("layerscale", lambda _, x, F: x + 0.25 * F(rms(x)), scale=0.25)
    torch.testing.assert_close(logits, model.head(rms(x)))


def test_fixup_equation(run):
    def prepare(model):
        for sublayer in model.sublayers:
            for name, value in (("multiplier", 0.7), ("bias_in", 0.1), ("bias_out", -0.2)):
                getattr(sublayer, name).data.fill_(value)
            sublayer.branch.output.weight.data.fill_(0.05)

    model, logits, x = run("fixup", lambda _, x, F: x + 0.7 * F(x + 0.1) - 0.2, prepare=prepare)
    torch.testing.assert_close(logits, model.head(x), rtol=1e-5, atol=1e-5)


def test_deepnorm_equation_and_init(run, rms):
    model, logits, x = run("deepnorm", lambda _, x, F: rms(6**0.25 * x + F(x)))
    torch.testing.assert_close(logits, model.head(x))
    plain = models.build("pre_ln", depth=6, width=16, heads=2).double()
    for index, name, factor in [
        (2, "query", 1),
        (2, "key", 1),
        (2, "value", 24**-0.25),
        (2, "output", 24**-0.25),
        (3, "hidden", 24**-0.25),
        (3, "output", 24**-0.25),
    ]:
        ours, base = (m.sublayers[index].branch.get_submodule(name).weight for m in (model, plain))
        torch.testing.assert_close(ours, factor * base, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("scheme", "factor", "options"),
    [
        ("gpt2_scaled_init", 1, {}),
        ("depth_mup", 3**-0.5, {}),
        ("depth_mup", 1.5**-0.5, {"base_depth": 4}),
        ("completep", 1 / 3, {}),
        ("completep", 1 / 1.5, {"base_depth": 4}),
    ],
)
def test_pre_ln_with_a_factor_equation(run, rms, scheme, factor, options):
    model, logits, x = run(scheme, lambda _, x, F: x + factor * F(rms(x)), **options)
    torch.testing.assert_close(logits, model.head(rms(x)))


def test_ln_scaling_equation(run, rms):
    model, logits, x = run("ln_scaling", lambda i, x, F: x + F(rms(x) / (i // 2 + 1) ** 0.5))
    torch.testing.assert_close(logits, model.head(rms(x)))


@pytest.mark.parametrize("kind", ["scalar", "vector", "token"])
def test_highway_equation(run, rms, kind):
    gate = 1 / (1 + np.exp(1.0))
    model, logits, x = run("highway", lambda _, x, F: gate * F(rms(x)) + (1 - gate) * x, gate=kind, gate_bias=-1.0)
    torch.testing.assert_close(logits, model.head(rms(x)), rtol=1e-5, atol=1e-5)


def test_ngpt_equation(run):
    def unit(x):
        return x / x.norm(dim=-1, keepdim=True)

    model, logits, x = run("ngpt", lambda _, x, F: unit(x + 0.05 * (unit(F(x)) - x)), start=unit)
    torch.testing.assert_close(logits, model.head(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("feed_forward", ["gelu", "swiglu"])
def test_ngpt_matrices_stay_on_the_sphere(feed_forward):
    model = models.build("ngpt", depth=2, width=16, heads=2, feed_forward=feed_forward)

    def lengths():
        for sublayer in model.sublayers:
            for name, parameter in sublayer.branch.named_parameters():
                if parameter.ndim == 2:
                    yield parameter.norm(dim=0 if name == "output.weight" else 1)
        yield model.embedding.weight.norm(dim=1)
        yield model.head.weight.norm(dim=1)

    def assert_unit():
        for length in lengths():
            torch.testing.assert_close(length, torch.ones_like(length))

    assert_unit()
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    model(torch.arange(16).view(1, 16)).logsumexp(-1).sum().backward()
    optimizer.step()
    assert max((length - 1).abs().max().item() for length in lengths()) > 0.01
    model.after_step()
    assert_unit()


# Gradient flow. Measured values and margins: residual-scheme reference, at depth 64 with unit gain.


@pytest.mark.parametrize("scheme", ["rezero", "skipinit", "fixup"])
def test_schemes_that_start_as_the_identity_are_exactly_flat(flow, scheme):
    measured = flow(scheme, depth=64)
    assert (measured.whole == measured.whole[0]).all()
    assert (measured.power == measured.power[0]).all()


def test_rezero_branches_start_with_gradients_of_exactly_zero_and_gates_do_not():
    model = models.build("rezero", depth=8)
    model(torch.arange(32).view(1, 32)).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        if ".branch." in name:
            assert parameter.grad.abs().max() == 0
        else:
            assert parameter.grad.abs().max() > 0


def test_fixup_gradients_start_in_last_matrices_only_and_fall_as_the_root_of_depth(fall_per_four):
    model = models.build("fixup", depth=4)
    model(torch.arange(32).view(1, 32)).logsumexp(-1).sum().backward()
    alive = {name.split(".")[-2] for name, p in model.named_parameters() if ".branch." in name and p.grad.any()}
    assert alive == {"output"}
    assert 1.6 < np.mean([fall_per_four("fixup", seed=seed) for seed in (0, 1)]) < 2.4


def test_layerscale_gradients_follow_lambda_and_not_depth(flow, fall_per_four):
    assert 0.75 < fall_per_four("layerscale", scale=0.1) < 1.35
    ratio = flow("layerscale", depth=64, scale=1e-2).top / flow("layerscale", depth=64, scale=1e-4).top
    assert ratio == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize(("depth", "scale"), [(36, 0.1), (48, 1e-5), (50, 1e-6)])
def test_layerscale_starts_smaller_in_deeper_models(depth, scale):
    model = models.build("layerscale", depth=depth, width=8, heads=2)
    torch.testing.assert_close(model.sublayers[1].scale.data, torch.full((8,), scale))


@pytest.mark.parametrize("seed", [0, 1])
def test_deepnorm_is_flat_and_uniform(flow, shortcut_slope, fall_per_four, seed):
    measured = flow("deepnorm", depth=64, seed=seed)
    for name in ("whole", "late", "first"):
        assert abs(measured.slope(name)) < 1e-3
    assert abs(shortcut_slope("deepnorm", depth=64, seed=seed)) < 1e-3
    gradients = measured.parameters[::2]
    assert 0.8 < gradients[:8].mean() / gradients[-8:].mean() < 1.25
    assert 1.7 < fall_per_four("deepnorm", seed=seed) < 2.3


def test_gpt2_init_makes_power_and_gradients_independent_of_depth(flow):
    shallow, deep = (flow("gpt2_scaled_init", depth=depth) for depth in (16, 256))
    assert 0.8 < shallow.top / deep.top < 1.25
    assert 0.8 < shallow.power[-1] / deep.power[-1] < 1.25
    middle = flow("gpt2_scaled_init", depth=64)
    gain = middle.branch_gain * middle.power[:-1] * 64  # what each branch would add without the factor
    assert middle.power[-1] == pytest.approx(middle.power[0] + gain.mean(), rel=0.12)


@pytest.mark.parametrize(("scheme", "low", "high"), [("depth_mup", 1.6, 2.3), ("completep", 3.6, 4.4)])
def test_depth_multipliers_set_how_gradients_fall(fall_per_four, scheme, low, high):
    assert low < fall_per_four(scheme) < high


def test_depth_multipliers_scale_the_optimizer():
    groups = models.build("depth_mup", depth=8, base_depth=2).parameter_groups(0.1)
    assert [group["scale"] for group in groups] == [0.5, 1.0, 1.0]
    assert groups[0]["eps"] == pytest.approx(0.5e-8)
    groups = models.build("completep", depth=8, base_depth=2).parameter_groups(0.1)
    assert [group["scale"] for group in groups] == [1.0, 1.0, 1.0]
    assert groups[0]["eps"] == pytest.approx(0.25e-8)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


@pytest.mark.parametrize("scheme", models.SCHEMES)
def test_every_parameter_is_in_exactly_one_optimizer_group(scheme):
    model = models.build(scheme, depth=4, width=16, heads=2, bias=True)
    grouped = [id(p) for group in model.parameter_groups(0.1) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_ln_scaling_grows_slowly(flow):
    power = {depth: flow("ln_scaling", depth=depth).power[-1] for depth in (16, 64, 256)}
    assert 2 < power[16] < power[64] < power[256] < 8
    gradients = flow("ln_scaling", depth=64).parameters[::2]
    assert 2.5 < gradients[:2].mean() / gradients[-2:].mean() < 10


@pytest.mark.parametrize("depth", [16, 64])
def test_highway_shortcut_slope_is_exact(shortcut_slope, depth):
    expected = -np.log10(1 - 1 / (1 + np.exp(2.0)))
    assert expected == pytest.approx(0.0551, abs=5e-5)
    assert shortcut_slope("highway", depth=depth) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("seed", [0, 1])
def test_ngpt_is_a_post_ln_with_a_shortcut_of_nineteen(shortcut_slope, seed):
    """Seeds scatter by 1e-4 around 6.0e-4, since x and F are not exactly orthogonal at 64 features."""
    assert 4e-4 < shortcut_slope("ngpt", depth=64, seed=seed) < 8e-4


def test_ngpt_gradients_do_not_depend_on_depth(fall_per_four):
    assert 0.85 < fall_per_four("ngpt") < 1.18
