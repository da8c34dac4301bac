"""Every way to compile a model is seen before hooks are put on it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.compiled import is_compiled


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def wrap(model):
    return torch.compile(model, backend="eager"), model


def itself(model):
    model.compile(backend="eager")
    return model, model


def part(model):
    model.second.compile(backend="eager")
    return model, model


def around(model):
    outer = nn.Sequential(model)
    return torch.compile(outer, backend="eager"), model


def method(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return model, model


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at every tensor
@pytest.mark.parametrize("how", [wrap, itself, part, around, method])
def test_seen_and_recorded_eagerly(how):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    called, model = how(net())
    assert is_compiled(model)
    with ks.watch(model, every=2, sites="all") as watch:
        for _ in range(4):
            called(torch.ones(1, 2)).sum().backward()
            watch.step()
    assert watch.run["gradients/norm"].steps.tolist() == [0, 2]
    assert watch.run["gradients/norm"].of("second.inner").values.min() > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "the steps between run compiled"


def test_another_model_is_not():
    model, other = net(), torch.compile(net(), backend="eager")
    assert not is_compiled(model)
    assert is_compiled(other)


def test_looking_does_not_import_dynamo():
    code = """
import sys, torch
from keelscope.compiled import is_compiled
before = "torch._dynamo" in sys.modules
assert not is_compiled(torch.nn.Linear(1, 1))
assert ("torch._dynamo" in sys.modules) == before
"""
    subprocess.run([sys.executable, "-c", code], check=True)
