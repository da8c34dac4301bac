"""Hooks after modules are taken off where residual sub-layers alone are looked at, and nothing is lost by that."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope import kernel
from keelscope.callbacks import ForwardHook
from keelscope.probe import resolve_probes

PROBES = [replace(probe, every=1) for probe in resolve_probes("sublayers")]
KNOWN = 6
"""Steps after which graphs repeat their shape."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.branch, self.late = nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()
        self.uses_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.branch(self.norm(x))
        return x + (self.late(found) if self.uses_late else found)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(3, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def _kernel(request, monkeypatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(kernel, "_native", None)
    elif not kernel.is_compiled():
        pytest.skip("the kernel is not built")


def made() -> tuple[Stack, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Stack()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def by_hand(model: Stack, x: torch.Tensor) -> torch.Tensor:
    x = model.embedding(x)
    for block in model.blocks:
        x = block(x)
    return model.head(x)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, forward=None) -> None:
    for _ in range(steps):
        (forward or model)(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def hooked(model: nn.Module) -> set[str]:
    """Paths of the modules with a hook of the watch after them."""
    return {path for path, m in model.named_modules() if any(isinstance(h, ForwardHook) for h in hooks_of(m))}


def hooks_of(module: nn.Module) -> Iterator[object]:
    yield from module._forward_hooks.values()


def values(run: ks.Run) -> dict[str, np.ndarray]:
    return {key: run.read(key).values for key in run.keys() if key.startswith("sublayers/")}  # noqa: SIM118


def test_modules_inside_others_lose_their_hook_and_no_step_is_lost():
    model, optimizer = made()
    with ks.watch(model, optimizer=optimizer, probes=PROBES, sites="leaves") as watch:
        train(model, optimizer)
        everywhere = hooked(model)
        train(model, optimizer, KNOWN)
        inside = {f"blocks.{i}.{name}" for i in range(3) for name in ("norm", "branch")}
        assert everywhere - hooked(model) == inside
        assert {"embedding", "head"} <= hooked(model)
        train(model, optimizer, 4)
        assert len(watch.run.steps) == KNOWN + 5
    (alpha,) = (found for name, found in values(watch.run).items() if name.endswith("/alpha"))
    assert np.isfinite(alpha).all()
    assert not hooked(model)
    leaves = {
        entry.path: entry.status for entry in watch.coverage if entry.what == "module" and entry.path in everywhere
    }
    assert {path for path, status in leaves.items() if status == "observed"} == {p for p in leaves if "late" not in p}


def test_a_module_that_runs_late_is_seen():
    model, optimizer = made()
    with ks.watch(model, optimizer=optimizer, probes=PROBES, sites="leaves") as watch:
        train(model, optimizer, KNOWN)
        assert "blocks.1.late" in hooked(model)
        model.blocks[1].uses_late = True
        train(model, optimizer, 2)
        assert "blocks.1.branch" in hooked(model), "another shape: everything is listened to again"
        called = watch._recorder._sightings.called
        assert id(model.blocks[1].late) in called
        assert id(model.blocks[2].late) not in called


@pytest.mark.parametrize("forward", ["whole", "by hand", "in turns", "a part of a block"])
def test_rows_are_those_of_a_watch_of_that_step_alone(forward):
    model, optimizer = made()
    hand = {"whole": [False], "by hand": [True], "in turns": [False, True], "a part of a block": [False]}[forward]
    with ks.watch(model, optimizer=optimizer, probes=PROBES) as watch:
        train(model, optimizer, KNOWN)
        rows = []
        for turn in range(6):
            if forward == "a part of a block" and turn == 2:
                train(model, optimizer, forward=lambda x: model.blocks[1].branch(x.new_ones(2, 8)))
                rows.append(None)
            way = (lambda x: by_hand(model, x)) if hand[turn % len(hand)] else None
            twin, other = copy.deepcopy((model, optimizer))
            with ks.watch(twin, optimizer=other, probes=PROBES) as once:
                train(twin, other, forward=None if way is None else (lambda x, twin=twin: by_hand(twin, x)))
            rows.append(values(once.run))
            train(model, optimizer, forward=way)
        found = values(watch.run)
    assert len(watch.run.steps) == KNOWN + len(rows)
    for row, alone in enumerate(rows, KNOWN):
        for name, series in found.items():
            if alone is None:
                assert np.isnan(series[row]).all()
            elif not np.isnan(series[row]).all() or forward == "whole":
                assert series[row] == pytest.approx(alone[name][0], rel=1e-12, nan_ok=True)
    seen = [
        not all(np.isnan(series[row]).all() for series in found.values()) for row in range(KNOWN, KNOWN + len(rows))
    ]
    assert sum(seen) >= len(rows) - 2


@pytest.mark.parametrize("other", ["other probes", "no optimizer", "calls"])
def test_where_hooks_have_more_to_do_they_stay(other):
    model, optimizer = made()
    probes = [*PROBES, *resolve_probes("default")] if other == "other probes" else PROBES
    given = None if other == "no optimizer" else optimizer
    with ks.watch(model, optimizer=given, probes=probes, sites="leaves", calls=other == "calls") as watch:
        for _ in range(KNOWN + 2):
            train(model, optimizer)
            if other == "no optimizer":
                watch.step()
        assert {"blocks.0.norm", "blocks.0.branch", "blocks.1.branch", "blocks.2.late"} <= hooked(model)


def test_hooks_are_back_after_a_module_has_come():
    model, optimizer = made()
    with ks.watch(model, optimizer=optimizer, probes=PROBES, sites="leaves"):
        train(model, optimizer, KNOWN)
        model.blocks[1].branch = nn.Linear(8, 8)
        train(model, optimizer, 2)
        assert {"blocks.0.branch", "blocks.1.branch"} <= hooked(model)
        train(model, optimizer, KNOWN)
        assert not {"blocks.0.branch", "blocks.1.branch"} & hooked(model)


def test_a_training_that_goes_on_without_the_modules_that_were_listened_to_is_heard_again():
    model, optimizer = made()
    model.embedding.requires_grad_(requires_grad=False)

    def by_parts(x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.linear(x, model.embedding.weight, model.embedding.bias)
        for block in model.blocks:
            x = torch.add(x, block.branch(block.norm(x)))
        return x.sum(-1)

    with ks.watch(model, optimizer=optimizer, probes=PROBES) as watch:
        train(model, optimizer, KNOWN)
        train(model, optimizer, 3, forward=by_parts)
        alpha = values(watch.run)["sublayers/alpha"]
    assert np.isfinite(alpha[:KNOWN]).all()
    assert np.isfinite(alpha[KNOWN + 1 :]).any(), "of a new structure the first step alone may be lost"
