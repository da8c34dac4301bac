"""What cannot be read is said to be unknown."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """A convolutional block, with a projection on its shortcut or not."""

    def __init__(self, before, after):
        super().__init__()
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.project = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x):
        return F.relu(self.conv(x) + self.project(x))


def test_projection_on_the_shortcut(look):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), Residual(4, 4), Residual(4, 8), Residual(8, 8))
    found = look(net, torch.randn(2, 3, 6, 6))
    assert [record.site for record in found.sublayers] == ["1", "3"]
    assert found.unknown == (
        "2: both operands of a sum pass a product of matrices or a convolution (a projection on the shortcut); it is "
        "not counted as a sub-layer.",
    )


def test_input_without_gradient(look):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = look(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, 8))
    assert len(found) == 3
    assert found.unknown == (
        "layers.0: one operand of a sum needs no gradient; if it is the input of the model, a first sub-layer is "
        "missing.",
    )


def test_fixed_positions_are_no_gap(look, stack, tokens):
    class Positions(stack):
        """Sinusoids on the embedding, which is projected first."""

        def forward(self, tokens):
            x = self.head(self.embedding(tokens))[..., :8] + torch.arange(6.0)[:, None].sin()
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    found = look(Positions(lambda b, x: x + b.branch(b.norm(x))), tokens)
    assert (len(found), found.unknown) == (3, ())


def test_frozen_layers(look, stack, tokens):
    model = stack(lambda b, x: x + b.branch(b.norm(x)), depth=5)
    for part in (model.embedding, *model.blocks[:2]):
        part.requires_grad_(requires_grad=False)
    found = look(model, tokens)
    assert [record.site for record in found.sublayers] == ["blocks.3", "blocks.4"]
    assert found.unknown == (
        "blocks.2: one operand of a sum needs no gradient; if it is the input of the model, a first sub-layer is "
        "missing.",
        "blocks.0 to blocks.1: no gradient is computed there, so that sub-layers inside are not seen.",
    )


def test_unknown_operation_is_taken_for_heavy_if_it_has_a_matrix(look, stack, tokens):
    class Kernel(torch.autograd.Function):
        """A product written by hand."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.mT

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient @ weight, (gradient.mT @ x).sum(0)

    class Copy(torch.autograd.Function):
        """What a data-parallel wrapper puts into the graph."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    found = look(stack(lambda b, x: Copy.apply(x) + Kernel.apply(b.norm(x), b.gates.weight)), tokens)
    assert found.forms() == {"x + F(n x)": 3}
