"""What waits until it is written has the values that it would have had at once."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope import assembly, kernel, models
from keelscope.errors import RecordingWarning
from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import RMS, SQUARES, Statistic
from keelscope.store.pace import Pace
from keelscope.waiting import may_wait
from keelscope_probes.outputs import OUTPUTS

compiled = pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel was not built")


class Sometimes(nn.Module):
    """A branch that runs on every other step, and one that puts NaN out on the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        x = torch.tanh(self.first(x))
        if self.steps % 2:
            x = x + self.branch(x)
        return self.last(x) * (math.nan if self.steps == 4 else 1.0)


def train(model, path, batch, *, steps=13, scale=1.0, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scale != 1.0)
    with ks.watch(model, path, optimizer=optimizer, **options) as session:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(batch + 0.01 * step if batch.is_floating_point() else batch).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            session.log(loss=loss)
    return session.run


CASES = {
    "transformer": lambda: (models.build("post_ln", depth=4, width=16, heads=2, vocabulary=32), torch.arange(8)[None]),
    "gates": lambda: (models.build("highway", depth=4, width=16, heads=2, vocabulary=32), torch.arange(8)[None]),
    "changes": lambda: (Sometimes(), torch.ones(2, 4)),
}


@compiled
@pytest.mark.parametrize(
    ("case", "scale", "where"),
    [
        ("transformer", 1.0, "file"),
        ("gates", 1024.0, "file"),
        ("changes", 1.0, "file"),
        ("changes", 1024.0, "memory"),
    ],
)
def test_rows_that_wait_are_those_that_do_not(case, scale, where, tmp_path, monkeypatch):
    runs = []
    for name in ("waiting", "at once"):
        torch.manual_seed(0)
        model, batch = CASES[case]()
        if name == "at once":
            monkeypatch.setattr(assembly, "may_wait", lambda _: False)
        path = tmp_path / f"{name}.h5" if where == "file" else None
        runs.append(train(model, path, batch, scale=scale, probes=("default", "norms", "updates"), sites="all"))
    waiting, now = runs
    assert waiting.keys() == now.keys()
    for key in sorted(set(now.keys())):
        a, b = waiting[key], now[key]
        if key not in {"scalars/watch_ms", "scalars/wall_time"}:
            np.testing.assert_allclose(a.values, b.values, rtol=1e-12, atol=0, err_msg=key)
        assert np.array_equal(a.steps, b.steps)
        if not key.startswith("scalars/"):
            group = key.split("/")[0]
            assert np.array_equal(waiting.observed(group), now.observed(group)), key


@compiled
def test_a_row_of_a_slow_step_is_not_kept_waiting(tmp_path):
    model = Sometimes()
    session = ks.watch(model, tmp_path / "run.h5", pace=Pace(delay=0.05))
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        session.step()
    model(torch.ones(2, 4))  # closes the row before
    for _ in range(200):
        if len(ks.open_run(tmp_path / "run.h5").steps) == 3:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the rows were not written")
    session.close()


@compiled
def test_a_statistic_of_others_does_not_wait():
    """It may look at all sites of a row at once, which several rows together would break."""
    share = Statistic("share", SQUARES, lambda t: t["squares"] / t["squares"].sum(), "1", "Share of all.")
    probe = TensorProbe("shares", Tap.OUTPUT, statistics=(share,))
    assert may_wait(OUTPUTS)
    assert not may_wait(probe)
    assert not may_wait(replace(OUTPUTS, statistics=(RMS, share)))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    run = train(model, None, torch.ones(2, 3), steps=4, probes=probe)
    assert np.nansum(run["shares/share"].values, axis=1) == pytest.approx(np.ones(4))


@compiled
def test_a_statistic_that_fails_costs_the_others_nothing(monkeypatch):
    def fails(_):
        raise ZeroDivisionError("never")

    fails.__module__ = "keelscope.statistics"
    bad = Statistic("bad", SQUARES, fails, "1", "Never there.")
    probe = TensorProbe("failing", Tap.OUTPUT, statistics=(bad,))
    with pytest.warns(RecordingWarning, match="Probe 'failing' failed"):
        run = train(nn.Linear(3, 3), None, torch.ones(2, 3), steps=4, probes=("outputs", probe))
    assert np.isfinite(run["outputs/rms"].values).all()
