"""A model may say itself what its sub-layers are."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Mixed(nn.Module):
    """Streams mixed by a matrix: no sum of shortcut and branch."""

    residual_topology = ({"form": "A x + F(x)", "schemes": ["mine"], "branch": "f", "beta": "beta", "alpha": 0.5},)

    def __init__(self):
        super().__init__()
        self.f, self.mix = nn.Linear(8, 8), nn.Linear(8, 8)
        self.beta = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.mix(x) + self.beta * self.f(x)


class Net(nn.Module):
    """Declared blocks between ordinary ones."""

    def __init__(self, block=Mixed):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), block(), block()])

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def test_declared_sublayers_stand_where_they_ran(look, tokens):
    found = look(Net(), tokens)
    assert [record.form for record in found.sublayers] == ["n(x + F(x))", "n(x + F(x))", "A x + F(x)", "A x + F(x)"]
    last = found.sublayers[-1]
    assert (last.site, last.branch, last.schemes, last.addition) == ("blocks.2", "blocks.2.f", ("mine",), "declared")
    assert (last.alpha.kind, last.alpha.value) == ("constant", 0.5)
    assert (last.beta.kind, last.beta.value, last.beta.parameter) == ("learnable scalar", 2.0, "blocks.2.beta")
    assert found.schemes == (("post_ln",), ("mine",))


def test_what_is_declared_replaces_what_is_found(look, tokens):
    class Plain(nn.Module):
        """A residual block that calls itself something else."""

        def __init__(self):
            super().__init__()
            self.f = nn.Linear(8, 8)

        def residual_topology(self):
            return [{"form": "x + F(x)", "schemes": "other"}]

        def forward(self, x):
            return x + self.f(x)

    found = look(Net(Plain), tokens)
    assert [(record.form, record.schemes) for record in found.sublayers[2:]] == [("x + F(x)", ("other",))] * 2


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ([{"schemes": ["mine"]}], "form is missing"),
        ([{"form": "x", "gain": 1}], "gain is no key of a sub-layer"),
        ([{"form": "x", "alpha": "nowhere"}], "nowhere"),
        (3, "not iterable"),
    ],
)
def test_a_declaration_that_cannot_be_used_is_said(declared, why, look, tokens):
    block = type("Wrong", (Mixed,), {"residual_topology": declared})
    found = look(Net(block), tokens)
    assert len(found) == 2
    assert found.unknown[-1].startswith("blocks.2: residual_topology cannot be used (")
    assert why in found.unknown[-1]
