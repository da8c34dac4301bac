"""Which rows close without a look at every probe, and that nothing is missing where a step is not ordinary."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope import kernel, models
from keelscope.agenda import Agenda, Agendas
from keelscope.probe import resolve_probes
from keelscope.rows import RowValues
from keelscope_probes.outputs import OUTPUTS

compiled = pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel was not built")


class Net(nn.Module):
    """A network that runs its first layer twice on some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.steps = 0
        self.again = False

    def forward(self, x):
        x = self.first(x)
        return self.last(self.first(x) if self.again else x)


@pytest.fixture
def closed(monkeypatch):
    """Of each row of a step, whether it closed by an agenda."""
    found = []
    close = Agenda.close

    def note(self, *seen):
        row = close(self, *seen)
        found.append(row is not None)
        return row

    monkeypatch.setattr(Agenda, "close", note)
    return found


def train(model, each_step=lambda _: None, *, steps=6, close=lambda session: session.close(), **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session = ks.watch(model, optimizer=optimizer, sites="leaves", **options)
    for step in range(steps):
        each_step(step)
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
        optimizer.step()
    close(session)
    return session


@compiled
def test_steps_like_one_before_close_by_it(closed):
    train(Net(), probes="outputs,gradients,parameter_gradients")
    assert closed == [False, False, True, True, True, True]  # of the second it is learned


@compiled
def test_a_step_that_is_not_ordinary_is_looked_at(closed, monkeypatch):
    runs = {}
    for how in ("by agenda", "in full"):
        if how == "in full":
            monkeypatch.setattr(Agenda, "learn", lambda _, __: None)
        torch.manual_seed(0)
        model = Net()
        once = partial(lambda model, step: setattr(model, "again", step == 4), model)
        runs[how] = train(model, once, probes="default", steps=8).run
    assert not closed[4]
    assert closed[5:8] == [True] * 3
    assert not any(closed[8:])
    for key in set(runs["in full"].keys()) - {"scalars/watch_ms", "scalars/wall_time"}:
        np.testing.assert_array_equal(runs["by agenda"][key].values, runs["in full"][key].values, err_msg=key)


@compiled
def test_rows_of_sublayers_close_by_it(closed, monkeypatch):
    runs = {}
    for how in ("by agenda", "in full"):
        if how == "in full":
            monkeypatch.setattr(Agenda, "learn", lambda _, __: None)
        torch.manual_seed(0)
        model = models.build("pre_ln", depth=4, width=8, heads=2, vocabulary=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        probes = [replace(probe, every=1) for probe in resolve_probes("sublayers,parameter_gradients")]
        with ks.watch(model, optimizer=optimizer, probes=probes) as session:
            for step in range(8):
                optimizer.zero_grad()
                with torch.no_grad() if step == 5 else torch.enable_grad():
                    output = model(torch.arange(6)[None] % 8)
                if step != 5:
                    output.square().mean().backward()
                optimizer.step()
        runs[how] = session.run
    assert closed[:8] == [False, False, True, True, True, False, True, True]
    assert not any(closed[8:])
    for key in set(runs["in full"].keys()) - {"scalars/watch_ms", "scalars/wall_time"}:
        np.testing.assert_array_equal(runs["by agenda"][key].values, runs["in full"][key].values, err_msg=key)
    known = np.isfinite(runs["by agenda"]["sublayers/branch_part"].values).all(axis=1)
    assert known.tolist() == [step != 5 for step in range(8)]


@compiled
def test_a_model_that_changes_is_learned_anew(closed):
    model = Net()

    def swap(step):
        if step == 4:
            model.last = nn.Linear(4, 1)

    run = train(model, swap, probes="outputs,parameter_gradients", steps=8).run
    assert closed[3:5] == [True, False]
    assert np.isfinite(run["outputs/rms"].of("last").values).all()
    assert np.isfinite(run["scalars/grad_norm_total"].values[:4]).all()


@compiled
def test_nothing_closes_by_it_with_calls_or_a_loss_scale(closed):
    train(Net(), calls=True, probes="outputs")
    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    with ks.watch(model, optimizer=optimizer, probes="parameter_gradients") as session:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert not any(closed)
    norms = session.run["parameter_gradients/norm"].of("last.bias").values
    assert norms[:, 0] == pytest.approx([1.0] * 6)


def test_a_row_with_values_teaches_nothing():
    agenda = Agenda([OUTPUTS])
    agenda.learn(RowValues({"outputs": {}}, {}, {}))
    assert agenda._frames is None


def test_the_same_probes_have_the_same_agenda():
    agendas = Agendas((OUTPUTS,))
    assert agendas.at(0) is agendas.at(1)
    assert agendas.at(1).every(OUTPUTS)
