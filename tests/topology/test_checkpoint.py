"""Activation checkpointing: structure is read, saved tensors are not, and nothing runs twice because of us."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from keelscope.models import build

EQUATIONS = {
    "n(a x + F(x))": lambda b, x: b.norm(3.0 * x + b.branch(x)),
    "x + b F(n x)": lambda b, x: x + b.alpha * F.dropout(b.branch(b.norm(x)), 0.0),
    "x + F(n x)": lambda b, x: x + b.branch(b.norm(x)),
}


class Checkpointed(nn.Module):
    """A block under checkpointing."""

    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant, self.runs = block, reentrant, 0

    def forward(self, x):
        self.runs += 1
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def wrapped(model, reentrant, every=1):
    for i, block in enumerate(model.blocks):
        if i % every == 0:
            model.blocks[i] = Checkpointed(block, reentrant)
    return model


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", EQUATIONS)
def test_same_topology(form, reentrant, every, look, stack, tokens):
    plain = look(stack(EQUATIONS[form], depth=4), tokens)
    found = look(wrapped(stack(EQUATIONS[form], depth=4), reentrant, every), tokens)
    assert [r.form for r in found.sublayers] == [r.form for r in plain.sublayers] == [form] * 4
    assert [r.alpha.value for r in found.sublayers] == [r.alpha.value for r in plain.sublayers]
    assert [r.beta.value for r in found.sublayers] == [r.beta.value for r in plain.sublayers]
    assert [r.branch.replace(".block.", ".") for r in found.sublayers] == [r.branch for r in plain.sublayers]
    assert {r.stream for r in found.sublayers} == {0}
    assert found.schemes == plain.schemes
    assert found.unknown == ()


def test_no_saved_tensor_is_unpacked(look, stack, tokens):
    """Unpacking one would run the user's forward again."""
    unpacked = []

    def through(block, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):
            gate = torch.sigmoid(block.gate(x))
            return block.norm(block.fixed * block.alpha * x + gate * block.scale * F.dropout(block.branch(x), 0.5))

    found = look(stack(through), tokens)
    assert unpacked == []
    assert len(found) == 3


def test_a_weight_that_would_have_to_be_unpacked_is_unknown(look, stack, tokens):
    def weighted(block, x):
        return block.norm(block.alpha * x + torch.full((8,), 2.0) * block.branch(x))

    found = look(wrapped(stack(weighted), reentrant=False), tokens)
    assert {(r.form, r.alpha.kind, r.alpha.value, r.beta.kind) for r in found.sublayers} == {
        ("unknown", "learnable scalar", 0.75, "unknown")
    }


def test_reentrant_without_a_backward_is_unknown(stack, tokens):
    from keelscope.topology import GraphReader

    model = wrapped(stack(EQUATIONS["x + F(n x)"]), reentrant=True)
    reader = GraphReader(model)
    found = reader.read(model(tokens).sum())
    assert len(found) == 0
    assert len(found.unknown) == 1  # modules were not reported, so that none can be named
    assert "CheckpointFunction hides its operations" in found.unknown[0]
    assert reader.is_waiting


def test_reference_model(look):
    """Each sub-layer under its own checkpoint."""

    class Each(nn.Module):
        """A sub-layer that is run again in the backward pass."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def carry(self, state, output):
            return self.inner.carry(state, output)

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=True)

    model = build("keel", depth=6, width=8, heads=2)
    for i in range(6):
        model.sublayers[i] = Each(model.sublayers[i])
    found = look(model, torch.ones(2, 5, dtype=torch.int64))
    assert [r.form for r in found.sublayers] == ["x + F(n x)", "n(x + F(n x))", *["n(a x + F(n x))"] * 4]
    assert [r.alpha.value for r in found.sublayers] == [1, 1, 6, 6, 6, 6]
    assert found.schemes == (("keel",),)


def test_branch_under_a_reentrant_checkpoint(look, stack, tokens):
    found = look(stack(lambda b, x: x + checkpoint(b.branch, b.norm(x), use_reentrant=True)), tokens)
    assert found.forms() == {"x + F(n x)": 3}
    assert {r.branch for r in found.sublayers} == {None}
