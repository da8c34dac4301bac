"""Every way to compile a model is seen before hooks are put on it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.compiled import is_compiled
from keelscope.errors import CoverageWarning


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


@pytest.mark.parametrize("wrapped", [True, False])
def test_compiled_after_watching(wrapped):
    """The graph is whole all the same; what the first step lacks is said, and the next recorded one runs eager."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    net = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loop() -> ks.Watch:
        with ks.watch(net, optimizer=optimizer, every=2) as watch:
            if wrapped:
                run = torch.compile(net, backend="aot_eager", fullgraph=True)
            else:
                net.compile(backend="aot_eager")
                run = net
            for _ in range(5):
                optimizer.zero_grad()
                run(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
        return watch

    with pytest.warns(CoverageWarning, match=r"compiled after watch\(\) began") as said:
        watch = loop()
    assert len(said) == 1
    seen = np.isfinite(watch.run["gradients/norm"].values)
    assert seen.all(axis=1).tolist() == [False, True, True]
    assert not seen[0].any()
    assert np.isfinite(watch.run["parameter_gradients/norm"].values).all()
    assert torch._dynamo.utils.counters["graph_break"] == {}
