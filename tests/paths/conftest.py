"""Gradients around every sub-layer, measured in one backward pass, and the same from autograd alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from keelscope.leaves import floating_leaves
from keelscope.paths import PathFlow, PathGradients
from keelscope.topology import GraphReader, Operands, Topology


@dataclass
class Split:
    """One backward pass, and what it should have shown."""

    topology: Topology
    gradients: dict[int, PathGradients] = field(default_factory=dict)
    operands: dict[int, Operands | None] = field(default_factory=dict)
    entering: dict[int, Tensor] = field(default_factory=dict)
    """The gradient of each entering stream tensor, from autograd."""
    detached: dict[int, Tensor] = field(default_factory=dict)
    """The same from a second backward pass in which the gradient of every branch's output is set to zero."""
    obstacles: tuple[str, ...] = ()


def split(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, oracle: bool = True, branches: set[str] | None = None
) -> Split:
    """Measure a model; with `oracle`, two backward passes of autograd come before the measured one.

    `branches` are the modules whose gradient is set to zero in the second one, else those that the topology names.
    """
    reader, silent = GraphReader(model, keep=True), set()
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.callback(_before(module, reader, path).remove)
            hooks.callback(_after(module, reader, path, silent).remove)
        loss = loss_of(model)
    topology = reader.read(loss)
    live = reader.live
    found = Split(topology, operands={sublayer.index: met for sublayer, met in live.operands()})
    if oracle:
        edges = [GradientEdge(live.nodes[node], output) for node, output in (s.entering for s in live.sublayers)]
        indices = [sublayer.index for sublayer in live.sublayers]
        found.entering = dict(zip(indices, _gradients(loss, edges), strict=True))
        silent |= branches or {sublayer.branch for sublayer in topology.sublayers if sublayer.branch}
        found.detached = dict(zip(indices, _gradients(loss, edges), strict=True))
        silent.clear()
    flow = PathFlow(live, found.gradients.__setitem__)
    flow.attach()
    loss.backward()
    found.obstacles = tuple(flow.obstacles)
    flow.detach()
    return found


def _gradients(loss: Tensor, edges: list[GradientEdge]) -> list[Tensor]:
    unique = list(dict.fromkeys(edges))
    found = dict(zip(unique, torch.autograd.grad(loss, unique, retain_graph=True, allow_unused=True), strict=True))
    return [found[edge] for edge in edges]


def _before(module: nn.Module, reader: GraphReader, path: str):
    return module.register_forward_pre_hook(lambda *_: reader.before_module(path), with_kwargs=True)


def _after(module: nn.Module, reader: GraphReader, path: str, silent: set[str]):
    """Note the call; a hook on the output, set before anything is written into it, passes no gradient on if asked."""

    def after(module: nn.Module, args: object, kwargs: object, output: object) -> None:
        leaf = next((leaf for _, leaf in floating_leaves(output)), None)
        if leaf is not None and leaf.requires_grad:
            leaf.register_hook(lambda gradient: torch.zeros_like(gradient) if path in silent else None)
        reader.on_module(path, module, (args, kwargs), output)

    return module.register_forward_hook(after, with_kwargs=True)


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """Largest difference, relative to the length of the second; 0 for two absent ones."""
    a = torch.zeros(()) if a is None else a
    b = torch.zeros(()) if b is None else b
    scale = max(b.double().norm().item(), torch.finfo(torch.float64).tiny)
    return (a.double() - b.double()).norm().item() / scale


@pytest.fixture(name="split", scope="session")
def _split():
    return split


@pytest.fixture(name="distance", scope="session")
def _distance():
    return distance
