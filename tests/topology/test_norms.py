"""Norms before, after and inside a branch, as modules, fused operations and written in pieces."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rms_by_power(x):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5) ** -0.5


def rms_in_float(x):
    return rms(x.float()).to(x.dtype)


def layer(x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)


def length(x):
    return F.normalize(x, dim=-1)


WRITTEN = {
    "rms": rms,
    "rms by power": rms_by_power,
    "rms in float": rms_in_float,
    "layer": layer,
    "length": length,
    "torch layer_norm": lambda x: F.layer_norm(x, (8,)),
    "torch rms_norm": lambda x: F.rms_norm(x, (8,)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_norm_without_a_module(name, middle):
    norm = WRITTEN[name]
    before = middle(lambda b, x: x + b.branch(norm(x)))
    after = middle(lambda b, x: norm(x + b.branch(x)))
    output = middle(lambda b, x: x + norm(b.branch(x)))
    inner = middle(lambda b, x: x + b.fall(norm(b.rise(x))) if name.startswith("rms") else x + b.branch(norm(x)))
    assert (before.form, before.norm_before) == ("x + F(n x)", "blocks.1:norm")
    assert (after.form, after.norm_after) == ("n(x + F(x))", "blocks.1:norm")
    assert (output.form, output.branch_norm) == ("x + n(F(x))", "blocks.1:norm")
    assert inner.form in {"x + W n(F(x))", "x + F(n x)"}


@pytest.mark.parametrize("name", WRITTEN)
def test_gain_and_bias_belong_to_the_norm(name, middle):
    norm = WRITTEN[name]
    record = middle(lambda b, x: norm(x + b.branch(x)) * b.scale + b.fall.bias)
    assert (record.form, record.alpha.is_one, record.beta.is_one) == ("n(x + F(x))", True, True)


class Gain(nn.Module):
    """A norm whose class name does not say so."""

    def __init__(self, normalise):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.normalise = normalise

    def forward(self, x):
        return self.weight * self.normalise(x)


@pytest.mark.parametrize("name", WRITTEN)
def test_module_recognised_by_what_it_computes(name, look, stack, tokens):
    model = stack(lambda b, x: b.norm(x + b.branch(x)))
    for block in model.blocks:
        block.norm = Gain(WRITTEN[name])
    found = look(model, tokens).sublayers
    assert [(record.form, record.norm_after) for record in found] == [
        ("n(x + F(x))", f"blocks.{i}.norm") for i in range(3)
    ]


def test_softmax_and_sums_to_one_are_no_norms(middle):
    record = middle(lambda b, x: x + b.branch(x.exp() / x.exp().sum(-1, keepdim=True)))
    assert (record.form, record.norm_before) == ("x + F(x)", None)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_norms_over_other_axes(norm, look, stack, tokens):
    model = stack(lambda b, x: x + b.norm(b.branch(x)))
    for block in model.blocks:
        block.norm = norm(6)
    found = look(model.train(), tokens).sublayers
    assert [(record.form, record.branch_norm) for record in found] == [
        ("x + n(F(x))", f"blocks.{i}.norm") for i in range(3)
    ]


def test_norm_of_the_shortcut(middle):
    record = middle(lambda b, x: b.norm(x) + b.branch(x))
    assert (record.form, record.shortcut_norm) == ("n x + F(x)", "blocks.1.norm")


def test_norm_that_shortcut_and_branch_share_is_the_stream(look, stack, tokens):
    """HybridNorm's feed-forward: y = n(x), y + F(y)."""

    def shared(block, x):
        y = block.norm(x)
        return y + block.branch(y)

    found = look(stack(shared), tokens)
    assert [record.form for record in found.sublayers] == ["n(x + F(x))", "n(x + F(x))", "x + F(x)"]
    assert found.sublayers[0].norm_after == "blocks.1.norm"


def test_branch_that_reads_through_a_norm_and_directly(look, stack, tokens):
    found = look(stack(lambda b, x: x + b.fall(F.gelu(b.rise(b.norm(x)) * b.gates(x).repeat(1, 1, 2)))), tokens)
    assert found.forms() == {"unknown": 3}
    assert "both through a norm and directly" in found.sublayers[0].note


def test_one_layer_alone(look):
    """No stack and no final norm: what follows the last sum is its own."""
    for norm_first, form in ((False, "n(x + F(x))"), (True, "x + F(n x)")):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
        found = look(layer, torch.randn(2, 5, 8, requires_grad=True))
        assert found.forms() == {form: 2}


def test_final_norm_without_a_stack(look, stack, tokens):
    class Flat(nn.Module):
        """Two sub-layers written out in the model itself."""

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.norm_1, self.norm_2, self.final = nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)
            self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 20)

        def forward(self, tokens):
            x = self.embedding(tokens)
            x = x + self.first(self.norm_1(x))
            x = x + self.second(self.norm_2(x))
            return self.head(self.final(x))

    assert look(Flat(), tokens).forms() == {"x + F(n x)": 2}
