"""Small models with one kind of residual sub-layer, and the way tests look at their topology."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keelscope import topology

WIDTH = 8


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def mean_square(output, _batch):
    """A loss for anything: tensors, HF outputs."""
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    return output.float().square().mean()


@pytest.fixture(scope="session")
def look():
    """``look(model, batch)``: the topology under a loss that depends on everything."""
    return lambda model, batch, loss=mean_square: topology.find(model, batch, loss)


@pytest.fixture
def tokens():
    return torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Parts that a residual equation may need; subclasses say the equation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise = nn.Linear(WIDTH, 2 * WIDTH)
        self.fall = nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.gates = nn.Linear(WIDTH, WIDTH)
        self.alpha = nn.Parameter(torch.tensor(0.75))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("fixed", torch.tensor(3.0))

    def branch(self, x):
        return self.fall(F.gelu(self.rise(x)))


class Stack(nn.Module):
    """Embedding, blocks that follow an equation ``(block, x) -> x``, norm, head."""

    def __init__(self, equation, depth=3):
        super().__init__()
        block = type("Equation", (Block,), {"forward": equation})
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.fixture(scope="session")
def stack():
    """``stack(equation, depth=3)``: a model whose blocks follow an equation."""
    return Stack


@pytest.fixture
def middle(look, tokens):
    """``middle(equation)``: the second of three sub-layers that follow an equation."""

    def get(equation, **options):
        model = Stack(equation, **options)
        found = look(model, tokens)
        assert len(found) == 3, found.forms()
        assert {record.form for record in found.sublayers} == {found.sublayers[1].form}
        return found.sublayers[1]

    return get
