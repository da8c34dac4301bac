"""Modules stay listened to from step to step: every row of sub-layers has what a watch of more probes has."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keelscope as ks
from keelscope import kernel
from keelscope.ears import Ear
from keelscope.probe import resolve_probes
from keelscope.structure import Look

SUBLAYERS = [replace(probe, every=1) for probe in resolve_probes("sublayers")]
MORE = [*SUBLAYERS, *resolve_probes("outputs,gradients")]
"""Gradients of every output show when a backward pass begins, wherever it does."""
STEPS = 13


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.raises = self.is_checkpointed = False

    def forward(self, x):
        if self.raises:
            raise ValueError
        if self.is_checkpointed:
            return x + checkpoint(self.branch, x, use_reentrant=False)
        return x + self.branch(x)

    def branch(self, x):
        return self.fall(torch.relu(self.rise(self.norm(x))))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.states = nn.LayerNorm(8), []

    def forward(self, tokens):
        self.states = [self.embedding(tokens)]
        for block in self.blocks:
            self.states.append(block(self.states[-1]))
        return self.norm(self.states[-1])


class Net(nn.Module):
    """A body inside of a model with a head, as in libraries."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(8, 20)

    def forward(self, tokens):
        return self.head(self.body(tokens))


def plain(model, tokens, _):
    return model(tokens).square().mean()


def middle_too(model, tokens, step):
    loss = plain(model, tokens, step)
    return loss + model.body.states[2].square().mean()


def from_block(place, model, tokens, _):
    model(tokens)
    return model.body.states[place].square().mean()


def of_body(model, tokens, _):
    return model.body(tokens).square().mean()


def in_parts(model, tokens, _):
    x = model.body.embedding(tokens)
    for block in model.body.blocks:
        x = block(x)
    return x.square().mean()


def twice(model, tokens, step):
    plain(model, tokens, step).backward()
    return middle_too(model, tokens.flip(1), step)


def evaluated(model, tokens, step):
    model.eval()
    with torch.no_grad():
        for _ in range(step * 5):
            model(tokens)
        model.body.blocks[0].raises = True
        with suppress(ValueError):
            model(tokens)
        model.body.blocks[0].raises = False
    return middle_too(model.train(), tokens, step)


def failed(model, tokens, step):
    if step in {2, 4, 9}:
        model.body.blocks[2].raises = True
        with suppress(ValueError):
            model(tokens)
        model.body.blocks[2].raises = False
    return middle_too(model, tokens, step)


def checkpointed(model, tokens, step):
    model.body.blocks[1].is_checkpointed = step > 8
    return from_block(-1, model, tokens, step)


def longer(model, tokens, step):
    return middle_too(model, tokens[:, : 3 + step // 4], step)


def swapped(model, tokens, step):
    if step in {3, 9}:
        torch.manual_seed(1)
        model.body.blocks[1].fall = nn.Linear(16, 8)
    return middle_too(model, tokens, step)


def removed(model, tokens, step):
    if step in {3, 9}:
        del model.body.blocks[1]
    return middle_too(model, tokens, step)


def traced(model, tokens, step):
    """Calls that open no row, though they have gradients."""
    if step in {2, 3, 9}:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            torch.jit.trace(model, tokens, check_trace=False)
    return middle_too(model, tokens, step)


def other_losses(model, tokens, step):
    loss = middle_too(model, tokens, step)
    return loss * 2.0 if step % 3 == 0 else loss


def run_before(model, tokens, step):
    """Something of the model trains between the steps, without a forward of the model."""
    if step:
        model.body.embedding.weight.square().sum().backward()
        model.zero_grad()
    return middle_too(model, tokens, step)


WAYS = {
    "plain": plain,
    "middle too": middle_too,
    "last block": lambda *step: from_block(-1, *step),
    "first block": lambda *step: from_block(1, *step),
    "of body": of_body,
    "in parts": in_parts,
    "twice": twice,
    "evaluated": evaluated,
    "failed": failed,
    "checkpointed": checkpointed,
    "longer": longer,
    "swapped": swapped,
    "removed": removed,
    "traced": traced,
    "run before": run_before,
    "other losses": other_losses,
}


def train(model, way, probes, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(12).view(2, 6)
    with ks.watch(model, optimizer=optimizer, probes=probes, **options) as session:
        for step in range(STEPS):
            way(model, tokens, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return session.run


def sublayers(run):
    return {key: run[key].values for key in run.keys() if key.startswith("sublayers/")}  # noqa: SIM118


@pytest.mark.parametrize("how", WAYS)
def test_alone_as_beside_others(how):
    torch.manual_seed(0)
    model = Net()
    reference = sublayers(train(copy.deepcopy(model), WAYS[how], MORE))
    found = sublayers(train(model, WAYS[how], SUBLAYERS))
    assert np.isfinite(reference["sublayers/shortcut_part"]).any(axis=1).all()
    for key, values in reference.items():
        np.testing.assert_allclose(found[key][1:], values[1:], rtol=1e-6, err_msg=key)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel was not built")
@pytest.mark.parametrize("how", ["middle too", "evaluated", "failed", "longer", "removed"])
def test_the_same_without_the_kernel(how, monkeypatch):
    torch.manual_seed(0)
    model = Net()
    compiled = sublayers(train(copy.deepcopy(model), WAYS[how], SUBLAYERS))
    monkeypatch.setattr(kernel, "_native", None)
    for key, values in sublayers(train(model, WAYS[how], SUBLAYERS)).items():
        np.testing.assert_allclose(compiled[key], values, rtol=1e-6, err_msg=key)


def test_the_first_watched_module_may_be_a_block():
    torch.manual_seed(0)
    run = train(Net(), plain, SUBLAYERS, sites=lambda _, module: isinstance(module, Block))
    assert all(np.isfinite(values).all() for values in sublayers(run).values())


def test_hooks_come_off_at_a_second_forward(monkeypatch):
    hung, hang = [], Look._hang

    def noted(look, *, on):
        hung.append((look._is_placed, on))
        hang(look, on=on)

    monkeypatch.setattr(Look, "_hang", noted)
    torch.manual_seed(0)
    changes = {}
    for name, way in {"plain": plain, "twice": twice}.items():
        hung.clear()
        train(Net(), way, SUBLAYERS)
        changes[name] = sum(before is not after for before, after in hung)
    assert changes["plain"] <= 6
    assert changes["twice"] >= 2 * STEPS - 2


def test_steps_without_a_row_are_not_listened_to():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = []
    with ks.watch(model, optimizer=optimizer, probes=[replace(probe, every=3) for probe in SUBLAYERS]):
        for step in range(8):
            heard.append(bool(model.body._forward_pre_hooks))
            plain(model, torch.arange(6)[None], step).backward()
            optimizer.step()
    assert heard == [step % 3 == 0 for step in range(8)]


@pytest.mark.parametrize("way", [plain, middle_too, of_body, longer])
def test_a_few_modules_are_listened_to_once_graphs_repeat_their_shape(way):
    torch.manual_seed(0)
    model, heard = Net(), []

    def noted(model, tokens, step):
        placed = [[*map(type, (m._forward_hooks | m._forward_pre_hooks).values())] for m in model.modules()]
        before = [any(isinstance(hook, Ear) for hook in m._forward_pre_hooks.values()) for m in model.modules()]
        heard.append((sum(Ear in hooks for hooks in placed), sum(before)))
        return way(model, tokens, step)

    values = sublayers(train(model, noted, SUBLAYERS))
    every = len([module for module in model.modules() if not isinstance(module, nn.ModuleList)])
    ends, beginnings = heard[-1]
    assert min(ends for ends, _ in heard[1:3]) >= every
    assert ends <= 2 * every // 3
    assert beginnings <= len(model.body.blocks) + 6
    assert all(np.isfinite(found[1:]).all() for found in values.values())
