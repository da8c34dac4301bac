"""Graphs of a shape that was read before are not read again, and every step shows what a fresh watch would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keelscope as ks
from keelscope import kernel
from keelscope.models import build
from keelscope.probe import resolve_probes
from keelscope.topology.memory import Memory

PROBES = [replace(probe, every=1) for probe in resolve_probes("sublayers")]
TOKENS = torch.randint(0, 20, (2, 6), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A block whose graph can be changed from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after, self.branch = nn.LayerNorm(8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)
        self.how, self.weight = "pre", 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "skip":
            return x
        if self.how == "post":
            return self.after(3.0 * x + self.drop(self.branch(x)))
        if self.how == "gate":
            return x + torch.sigmoid(x.mean(-1, keepdim=True)) * self.branch(self.norm(x))
        if self.how == "checkpoint":
            return x + checkpoint(lambda z: self.branch(self.norm(z)), x, use_reentrant=False)
        if self.how == "twice":
            return x + self.branch(self.norm(x)) + 0.1 * self.branch(self.norm(x))
        if self.how == "second reader":
            return x + self.branch(self.norm(x)) * x.tanh()
        return torch.add(x, self.drop(self.branch(self.norm(x))), alpha=self.weight)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x)


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, tokens: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(seed)
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def by_path(run: ks.Run, row: int) -> dict[tuple[str, str], float]:
    names = [key for key in list(run.keys()) if key.startswith("sublayers/")]
    return {
        (series.name, site.path): float(series.values[row, i])
        for series in map(run.read, names)
        for i, site in enumerate(series.sites)
    }


def compare(model: nn.Module, changes: list[Callable[[nn.Module], torch.Tensor | None]]) -> list[int]:
    """Change the model before each step; whatever a fresh watch of a copy shows is what the long watch shows.

    Returns:
        Rows that have nothing: the first of another structure, when a few modules were listened to.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fresh = []
    with ks.watch(model, optimizer=optimizer, probes=PROBES) as watch:
        for seed, change in enumerate(changes):
            tokens = change(model)
            tokens = TOKENS if tokens is None else tokens
            twin = copy.deepcopy(model)
            other = torch.optim.SGD(twin.parameters(), lr=0.1)
            with ks.watch(twin, optimizer=other, probes=PROBES) as once:
                expected = step(twin, other, seed, tokens)
            fresh.append(by_path(once.run, 0))
            assert torch.equal(step(model, optimizer, seed, tokens), expected)
    missed = []
    for row, values in enumerate(fresh):
        found = by_path(watch.run, row)
        if all(map(np.isnan, found.values())):
            missed.append(row)
            continue
        known = {key: value for key, value in values.items() if key in found}
        assert {key: found[key] for key in known} == pytest.approx(known, rel=1e-12, abs=0, nan_ok=True)
        assert all(np.isnan(value) for key, value in found.items() if key not in known)
    return missed


def ways(*changed: tuple[int, str]) -> Callable[[Stack], None]:
    def change(model: Stack) -> None:
        for block in model.blocks:
            block.how = "pre"
        for index, how in changed:
            model.blocks[index].how = how

    return change


@pytest.fixture(params=["compiled", "torch"])
def _kernel(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(kernel, "_native", None)
    elif not kernel.is_compiled():
        pytest.skip("the kernel is not built")


@pytest.mark.parametrize("how", ["skip", "post", "gate", "checkpoint", "twice", "second reader"])
@pytest.mark.usefixtures("_kernel")
def test_a_graph_that_changes_from_step_to_step(how):
    changed = [ways((1, how)), ways((1, how)), ways((2, how)), ways(), ways((0, how), (3, how))]
    assert compare(stack(), [ways(), *changed]) == []
    assert compare(stack(), [ways()] * 4 + changed) == [4]
    model = stack()
    changed[0](model)
    assert compare(model, changed[:1] * 3 + changed * 3) in ([5], [2], [])


@pytest.mark.parametrize("lengths", [(5, 7, 5, 7, 5, 7), (5, 5, 7, 7, 5, 5, 7), (5, 6, 5, 7, 6, 5, 6)])
@pytest.mark.usefixtures("_kernel")
def test_shapes_that_come_back(lengths):
    """As with batches of several lengths; what was planned for each of them is still there."""

    def cut(length: int) -> Callable[[Stack], torch.Tensor]:
        return lambda _: torch.randint(0, 20, (2, length), generator=torch.Generator().manual_seed(length))

    assert compare(stack(), [cut(length) for length in lengths]) == []
    assert compare(stack(), [cut(9)] * 4 + [cut(length) for length in lengths]) == []


def test_training_and_evaluation_mode_in_turn():
    def train(model: Stack) -> None:
        model.train()

    def evaluate(model: Stack) -> None:
        model.eval()

    assert compare(stack(), [train, evaluate] * 4) == []
    assert compare(stack(), [train] * 4 + [evaluate, train] * 4) == [4]


def test_other_numbers_in_the_same_graph():
    def weighted(weight: float) -> Callable[[Stack], None]:
        def change(model: Stack) -> None:
            for block in model.blocks:
                block.weight = weight

        return change

    assert compare(stack(), [weighted(1.0)] * 4 + [weighted(0.5), weighted(0.5), weighted(0.25)]) == []


def test_other_modules_in_the_same_graph():
    def ordered(*order: int) -> Callable[[Stack], None]:
        return lambda model: model.__dict__.update(order=list(order))

    changed = [ordered(1, 0, 2, 3), ordered(0, 1, 2), ordered(3, 2, 1, 0)]
    assert compare(stack(), [ordered(0, 1, 2, 3)] * 2 + changed) == []
    assert compare(stack(), [ordered(0, 1, 2, 3)] * 4 + changed) == [4]


def test_depths_that_take_turns():
    """What is listened to for one of them is not what the other needs."""

    def ordered(*order: int) -> Callable[[Stack], None]:
        return lambda model: model.__dict__.update(order=list(order))

    turns = [ordered(0, 1) if row % 4 == 3 else ordered(0, 1, 2, 3) for row in range(28)]
    assert compare(stack(), turns) == [3]


def test_modules_run_by_hand_behind_those_that_are_listened_to():
    model, ends = stack(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(model, optimizer=optimizer, probes=PROBES) as watch:
        for row in range(12):
            x = model.embedding(TOKENS)
            for block in model.blocks[: 2 if row < 6 else 4]:
                x = block(x)
            x.register_hook(lambda gradient: ends.append(float(gradient.norm())))
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = watch.run["sublayers/shortcut_only_gradient"].values
    assert np.isnan(found[6]).all()
    rows = [row for row in range(1, 12) if row != 6]
    np.testing.assert_allclose(found[rows, 0], np.array(ends)[rows], rtol=1e-5)


def test_other_sizes_and_types():
    several = [TOKENS] * 4 + [TOKENS[:, :3], TOKENS.repeat(2, 2), TOKENS[:1, :1]]
    sizes = [lambda _, tokens=tokens: tokens for tokens in several]
    assert compare(stack(), [*sizes, lambda model: model.double() and None, lambda _: None]) == []


def test_a_module_put_in_the_place_of_another():
    def replaced(model: Stack) -> None:
        torch.manual_seed(5)
        model.blocks[1].branch.weight = nn.Parameter(torch.randn(8, 8))

    assert compare(stack(), [ways(), ways(), replaced, ways()]) == []
    assert compare(stack(), [ways()] * 4 + [replaced, ways(), ways()]) == []


@pytest.mark.parametrize("scheme", ["keel", "post_ln", "layerscale", "highway", "residual_dual", "ngpt", "mhc"])
def test_reference_models(scheme):
    model = build(scheme, depth=4, width=16, heads=2, vocabulary=20, dropout=0.1)
    assert compare(model, [lambda _: None] * 6) == []


def test_the_graph_is_read_once(monkeypatch):
    recalled = []
    recall = Memory.recall
    monkeypatch.setattr(
        Memory, "recall", lambda self, listener: recalled.append(recall(self, listener)) or recalled[-1]
    )
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # The first row closes in the middle of the second forward, the beginning of which is not listened to.
    post = ways((1, "post"))
    changes = [ways(), ways(), ways(), post, post, post, ways(), ways((2, "post"))]
    with ks.watch(model, optimizer=optimizer, probes=PROBES):
        for seed, change in enumerate(changes):
            change(model)
            step(model, optimizer, seed, TOKENS)
    assert [found is not None for found in recalled] == [False, True, True, False, False, True, True, False]
