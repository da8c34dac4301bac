"""keel_gate and keel_ablation: identities with keel and post_ln, and what a gate of 1 does."""

from __future__ import annotations

import math

import pytest
import torch

from keelscope import models
from keelscope.models.gates import Gate
from keelscope.text import Text


@pytest.fixture(scope="module")
def tokens():
    return Text.read().batch(0, 8, 32, seed=0)


def gradients(tokens, scheme, **options):
    model = models.build(scheme, **{"depth": 32, **options}).double()
    loss = torch.nn.functional.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten())
    loss.backward()
    shared = {name: p.grad for name, p in model.named_parameters() if ".branch." in name or "embedding" in name}
    return loss.item(), shared


def assert_same(one, other, relative):
    assert one[0] == pytest.approx(other[0], rel=relative)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert (gradient - other[1][name]).norm() <= relative * other[1][name].norm(), name


def test_the_gate_at_its_default_is_keel(tokens):
    assert_same(gradients(tokens, "keel_gate"), gradients(tokens, "keel", first_block="none"), 1e-4)


def test_a_gate_of_a_half_is_post_ln_with_a_norm_on_the_branch(tokens):
    half = gradients(tokens, "keel_gate", gate_init=0.5, epsilon=0.0)
    assert_same(half, gradients(tokens, "keel", alpha=1.0, first_block="none", epsilon=0.0), 1e-9)


def test_stage_four_is_keel_and_stages_one_to_three_are_their_formulas(run, rms, tokens):
    assert_same(gradients(tokens, "keel_ablation", stage=4), gradients(tokens, "keel", first_block="none"), 1e-12)
    beta = torch.linspace(0.5, 2, 16, dtype=torch.float64)

    def set_beta(model):
        for sublayer in model.sublayers:
            if sublayer.beta is not None:
                sublayer.beta.data = beta

    formulas = {
        1: lambda _, x, F: rms(6 * x + F(x)),
        2: lambda _, x, F: rms(6 * x + F(beta * x)),
        3: lambda _, x, F: rms(6 * x + F(beta * rms(x))),
    }
    for stage, formula in formulas.items():
        model, logits, x = run("keel_ablation", formula, prepare=set_beta, stage=stage)
        torch.testing.assert_close(logits, model.head(x))


def test_stage_three_learns_one_scale_per_branch_input_and_not_two():
    model = models.build("keel_ablation", stage=3, depth=2)
    assert model.sublayers[0].beta.requires_grad
    assert not model.sublayers[0].branch_norm.weight.requires_grad


def test_ablations_are_flat_at_init(flow):
    for stage in (1, 2, 3, 4):
        measured = flow("keel_ablation", depth=64, stage=stage)
        assert abs(measured.slope("whole")) < 1e-3
        assert abs(measured.slope("late")) < 1e-3


@pytest.mark.parametrize("kind", ["scalar", "vector", "token"])
@pytest.mark.parametrize("outer_norm", [True, False])
def test_gate_equation(run, rms, kind, outer_norm):
    weight = torch.linspace(-0.1, 0.1, 16, dtype=torch.float64)

    def set_gate(model):
        for sublayer in model.sublayers:
            if kind == "token":
                sublayer.gate.weight.data = weight
            if kind == "vector":
                sublayer.gate.bias.data = 0.7 + weight

    def formula(_, x, F):
        gate = {"scalar": 0.7, "vector": 0.7 + weight, "token": 0.7 + (x * weight).sum(-1, keepdim=True)}[kind]
        mixed = gate * x + (1 - gate) * F(rms(x))
        return rms(mixed) if outer_norm else mixed

    options = {"gate": kind, "gate_init": 0.7, "outer_norm": outer_norm}
    model, logits, x = run("keel_gate", formula, prepare=set_gate, **options)
    torch.testing.assert_close(logits, model.head(x if outer_norm else rms(x)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["raw", "clamp", "sigmoid"])
def test_a_gate_of_one_has_branches_with_gradients_of_exactly_zero(tokens, activation):
    model = models.build("keel_gate", depth=8, gate_init=1.0, activation=activation)
    torch.nn.functional.cross_entropy(model(tokens[0]).flatten(0, 1), tokens[1].flatten()).backward()
    branches = [p.grad for name, p in model.named_parameters() if ".branch." in name]
    assert all(gradient is not None and gradient.abs().max() == 0 for gradient in branches)
    gates = [sublayer.gate.bias.grad.abs().item() for sublayer in model.sublayers]
    if activation == "sigmoid":
        assert max(gates) == 0
    else:
        assert min(gates) > 0


def test_a_clamped_gate_above_one_is_stuck():
    gate = Gate(4, start=1.0, activation="clamp")
    gate.bias.data += 0.1
    value = gate(torch.ones(1, 1, 4))
    value.sum().backward()
    assert value.item() == 1
    assert gate.bias.grad.item() == 0


@pytest.mark.parametrize("depth", [16, 64])
def test_without_outer_norm_the_gate_sets_the_slope(flow, shortcut_slope, depth):
    options = {"gate_init": 0.99, "outer_norm": False, "depth": depth}
    assert shortcut_slope("keel_gate", **options) == pytest.approx(-math.log10(0.99), rel=0.01)
    assert flow("keel_gate", **options).slope("late") == pytest.approx(-math.log10(0.99), rel=0.03)


def test_without_outer_norm_the_head_reads_through_a_norm():
    assert models.build("keel_gate", depth=2).closing is None
    assert models.build("keel_gate", depth=2, outer_norm=False).closing is not None
    assert models.build("keel_gate", depth=2, outer_norm=False, final_norm=False).closing is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "matrix"}, "gate = 'matrix' is not known: choose from scalar, token, vector"),
        ({"gate_init": 1.5}, "gate_init = 1.5 cannot be used: give a number from 0 to 1"),
        ({"activation": "sigmoidal"}, "activation = 'sigmoidal' is not known: did you mean 'sigmoid'?"),
    ],
)
def test_gates_that_cannot_be_built(options, message):
    with pytest.raises(ValueError, match=r".") as caught:
        models.build("keel_gate", **options)
    assert str(caught.value) == message


def test_an_unknown_stage():
    with pytest.raises(ValueError, match="stage = 5 cannot be used: the paper has stages 1 to 4"):
        models.build("keel_ablation", stage=5)
