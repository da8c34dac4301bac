"""A module that returns a namedtuple with a nested list, one part of which nobody uses.

Source: pytorch/pytorch#112433
Gist: wrapping the outputs for a backward hook rebuilds them as a plain tuple, and attribute access fails in the
    caller.
Expectation: the type and the objects stay; each part has its gradient, the unused one None.
"""

from typing import NamedTuple

import torch
from reference import double, linear, norms, params
from torch import Tensor, nn

KIND = "io-structure"
SOURCE = "pytorch/pytorch#112433"


class Parts(NamedTuple):
    main: Tensor
    extra: list[Tensor]


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return Parts(self.a(x), [self.b(x), self.c(x)])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.split = Split()

    def forward(self, x):
        parts = self.split(x)
        assert type(parts) is Parts
        return parts.main.pow(2).mean() + parts.extra[0].sum() / 7


def data():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(224))


def build():
    torch.manual_seed(324)
    model, x = Net(), data()

    def step(m):
        m.zero_grad()
        loss = m(x)
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w, x = double(build()[0]), data().double()
    main, first, second = (linear(x, w, f"split.{name}") for name in "abc")
    loss = main.pow(2).mean() + first.sum() / 7
    leaves = norms(loss, {"0": main, "1.0": first, "1.1": second})
    return {"params": params(loss, w), "modules": {"split": {"calls": 1, "leaf_grad_norms": [leaves]}}, "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "model_output_unchanged": True},
    "diagnosis": {"per_module": {"split.a": "healthy", "split.c": "disconnected"}},
    "params": {
        "split.a.weight": {"grad_norm": 0.910247714},
        "split.a.bias": {"grad_norm": 0.455894837},
        "split.b.weight": {"grad_norm": 0.776223654},
        "split.b.bias": {"grad_norm": 1.01015254},
        "split.c.weight": {"grad_norm": None},
        "split.c.bias": {"grad_norm": None},
    },
    "modules": {"split": {"calls": 1, "leaf_grad_norms": [{"0": 0.351102515, "1.0": 0.451753951, "1.1": None}]}},
    "loss": -0.403991961,
}
