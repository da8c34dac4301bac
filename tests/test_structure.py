"""The residual structure that a recording finds in its first step, without a forward or backward of its own."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import keelscope as ks
from keelscope.models import build
from keelscope.store.columns import Columns
from keelscope.structure import Look
from keelscope.topology import GraphReader


class Block(nn.Module):
    """A residual block that joins in place, on a view, or under a checkpoint."""

    def __init__(self, kind):
        super().__init__()
        self.norm, self.rise, self.fall = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.kind, self.runs = kind, 0

    def forward(self, x):
        if self.kind == "reentrant":
            return checkpoint(self.plain, x, use_reentrant=True)
        if self.kind == "non-reentrant":
            return checkpoint(self.plain, x, use_reentrant=False)
        if self.kind == "in place":
            z = self.fall(F.gelu(self.rise(self.norm(x))))
            z += x
            return z
        return self.plain(x)

    def plain(self, x):
        self.runs += 1
        return self.norm(2.0 * x + self.fall(F.gelu(self.rise(x))))


def net(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), *[Block(kind) for _ in range(3)], nn.Linear(8, 20))


def train(model, tokens, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(2):
            model(tokens).square().mean().backward()
        yield
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("kind", "form", "alpha"),
    [
        ("plain", "n(a x + F(x))", 2.0),
        ("non-reentrant", "n(a x + F(x))", 2.0),
        ("reentrant", "n(a x + F(x))", 2.0),
        ("in place", "x + F(n x)", 1.0),
    ],
)
def test_sublayers_of_a_recording(kind, form, alpha):
    model, tokens = net(kind), torch.arange(12).view(2, 6)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(model, optimizer=optimizer) as watch:
        for _ in range(2):
            for _ in range(2):
                model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for _ in train(plain, tokens):
        pass
    assert [(s.form, s.alpha) for s in watch.run.info.sublayers] == [(form, pytest.approx(alpha))] * 3
    assert [s.branch for s in watch.run.info.sublayers] == [f"{i}.fall" for i in (1, 2, 3)]
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert [block.runs for block in model[1:4]] == [block.runs for block in plain[1:4]]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_report_of_a_reference_model():
    model = build("keel", depth=6, width=8, heads=2)
    run = ks.report(model, torch.arange(12).view(2, 6), lambda output, _: output.square().mean()).run
    assert [s.form for s in run.info.sublayers][1:3] == ["n(x + F(n x))", "n(a x + F(n x))"]
    assert [s.alpha for s in run.info.sublayers] == [1, 1, 6, 6, 6, 6]


def hooks_of(model):
    names = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs")
    return [getattr(module, name) for module in model.modules() for name in names]


@pytest.mark.parametrize(("kind", "waits"), [("plain", False), ("reentrant", True)])
def test_modules_are_not_listened_to_while_the_graph_is_read(kind, waits, monkeypatch):
    model, tokens, counts = net(kind), torch.arange(6).reshape(2, 3), []
    read = GraphReader.read

    def counted(reader, *outputs):
        counts.append(sum(map(len, hooks_of(model))))
        return read(reader, *outputs)

    monkeypatch.setattr(GraphReader, "read", counted)
    look, told = Look(model), []
    look.on_gates = lambda _topology, _gates, is_all: told.append(is_all)
    look.listen([(path, module) for path, module in model.named_modules()], keep=False)
    assert sum(map(len, hooks_of(model))) > 0
    loss = model(tokens).square().mean()
    look.read()
    assert (counts, told) == ([0], [not waits])
    assert bool(sum(map(len, hooks_of(model)))) is waits
    loss.backward()
    look.stop()
    assert sum(map(len, hooks_of(model))) == 0
    assert len(look.topology) == 3


def test_dictionaries_of_hooks_give_back_their_room():
    model = net("plain")
    empty = [sys.getsizeof(hooks) for hooks in hooks_of(model)]
    look = Look(model)
    look.listen([(path, module) for path, module in model.named_modules()], keep=False)
    look.stop()
    assert [sys.getsizeof(hooks) for hooks in hooks_of(model)] == empty


def test_first_row_of_blocks_that_are_called_by_hand_sees_the_end_of_the_graph():
    """Nothing but the graph's own hooks is there, and the last sum's node is the first that backward comes to."""
    model = net("in place")
    tokens, optimizer = torch.randint(20, (2, 5)), torch.optim.SGD(model.parameters(), lr=0.0)
    with ks.watch(model, optimizer=optimizer, probes="sublayers") as session:
        for _ in range(11):
            x = model[0](tokens)
            for block in model[1:-1]:
                x = block(x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run = session.run
    for name in ("output_gradient", "sum_gradient", "shortcut_part", "shortcut_only_gradient"):
        first, later = run[f"sublayers/{name}"].values
        assert first.shape == (3,)
        assert (first > 0).all()
        assert first == pytest.approx(later, rel=1e-9)


def test_what_is_kept_of_a_structure_is_what_was_read_in_columns():
    model, tokens = net("plain"), torch.arange(6).reshape(2, 3)
    look, read = Look(model), []
    look.on_gates = lambda topology, *_: read.append(topology)
    look.listen([(path, module) for path, module in model.named_modules()], keep=False)
    loss = model(tokens).square().mean()
    look.read()
    loss.backward()
    look.stop()
    assert isinstance(look.topology.sublayers, Columns)
    assert look.topology == read[0]
    assert [s.number for s in look.topology.sublayers] == [s.number for s in read[0].sublayers]
