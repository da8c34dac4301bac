"""A sparse schedule is dense where something happens: which steps, why, and with the numbers of dense recording."""

from __future__ import annotations

import contextlib
import io
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.arming import Arm, Past
from keelscope.errors import UsageError

STEPS = 60


def batch(step: int, spikes: dict[int, float]) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) * spikes.get(step, 1.0)


def train(spikes=(), *, steps=STEPS, log="after", clip=0.0, watched=True, **options):
    """A regression with a wild batch here and there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = ks.watch(model, options.pop("path", None), optimizer=optimizer, **options) if watched else None
    losses = []
    for step in range(steps):
        x = batch(step, dict(spikes))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        if watch is not None and log == "before":
            watch.log(loss=loss)
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            if watch is not None and log != "nothing":
                watch.log(grad_norm=norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch is not None and log == "after":
            watch.log(loss=loss)
            watch.log(more=2 * loss.item())  # another number of the same step is not too late
    if watch is not None:
        watch.close()
    return watch, losses, [p.detach().clone() for p in model.parameters()]


def test_distance_is_the_robust_z_of_the_window():
    values = np.random.default_rng(0).normal(3.0, 0.5, 200)
    past = Past(window=50, least=10)
    found = [past.judge(value) for value in values]
    assert found[:10] == [0.0] * 10
    for i in range(10, 200):
        known = values[max(0, i - 50) : i]
        spread = 1.4826 * np.median(np.abs(known - np.median(known)))
        assert found[i] == pytest.approx((values[i] - np.median(known)) / spread)


def test_numbers_that_do_not_vary_have_room_of_one_percent():
    past = Past(window=50, least=10)
    assert [past.judge(2.0) for _ in range(20)] == [0.0] * 20
    assert past.judge(2.1) == pytest.approx(5.0)
    zeros = Past(window=50, least=10)
    assert [zeros.judge(0.0) for _ in range(20)] == [0.0] * 20
    assert 1e6 < zeros.judge(1.0) < math.inf


def test_only_the_first_number_that_is_not_finite_counts():
    past = Past(window=8, least=2)
    assert [past.judge(value) for value in (math.nan, math.inf, 1.0, math.inf)] == [math.inf, 0.0, 0.0, math.inf]


@pytest.mark.parametrize("log", ["after", "before"])
@pytest.mark.parametrize("at", [33, 40, 39])
def test_the_steps_after_a_spike_are_recorded(log, at):
    """Between two recorded steps, on a recorded one, and just before one."""
    arm = Arm(steps=5, z=8.0, on="loss", gradients=False)
    watch, losses, _ = train({at: 30.0}, log=log, every=20, arm=arm)
    run, dense = watch.run, train({at: 30.0}, log=log, every=1)[0].run
    wanted = sorted({0, 20, 40, *range(at + 1, at + 6)})
    assert run.steps.tolist() == wanted
    for key in ("gradients/norm", "outputs/rms", "parameter_gradients/norm", "norms/jacobian_gain"):
        rows = np.searchsorted(dense[key].steps, run[key].steps)
        np.testing.assert_array_equal(run[key].values, dense[key].values[rows], err_msg=key)
    scalars = {name: dict(zip(run[f"scalars/{name}"].steps.tolist(), run[f"scalars/{name}"].values, strict=True))
               for name in run.scalars}  # fmt: skip
    np.testing.assert_allclose(list(scalars["loss"].values()), losses)
    assert len(scalars["loss"]) == STEPS
    assert [step for step in wanted if scalars["armed"][step]] == [step for step in wanted if step % 20]
    before = np.array(losses[:at])
    distance = (losses[at] - np.median(before)) / (1.4826 * np.median(np.abs(before - np.median(before))))
    reasons = {step: value for step, value in scalars["armed_by_loss"].items() if not math.isnan(value)}
    assert reasons == pytest.approx({at: distance})


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_gradient_is_looked_at_where_nothing_is_logged(clip):
    """What the optimizer uses, on every step; clipped gradients never rise."""
    watch, _, _ = train({33: 30.0}, log="nothing", clip=clip, every=20, arm=Arm(steps=3, z=8.0))
    assert watch.run.steps.tolist() == ([0, 20, 40] if clip else [0, 20, 34, 35, 36, 40])
    if not clip:
        assert np.flatnonzero(watch.run["scalars/armed_by_gradients"].values >= 8.0).size == 1


def test_a_norm_that_the_user_logs():
    watch, _, _ = train({33: 30.0}, clip=1.0, every=20, arm=Arm(steps=3, z=8.0, on="grad_norm"))
    assert watch.run.steps.tolist() == [0, 20, 34, 35, 36, 40]


def test_the_norm_of_recorded_steps_is_that_before_clipping():
    watch, _, _ = train({40: 30.0}, log="nothing", clip=1.0, every=2, arm=Arm(steps=3, z=8.0))
    odd = [step for step in watch.run.steps.tolist() if step % 2]
    assert odd == [43], "the row of step 40 is closed when step 41 is over"


def test_steps_before_a_number_that_is_not_finite():
    arm = Arm(steps=4, before=6)
    watch, _, _ = train({33: math.inf}, every=20, arm=arm)
    run = watch.run
    assert run.steps.tolist() == [0, 20, *range(27, 34), *range(34, 38), 40]
    dense = train({33: math.inf}, every=1)[0].run
    rows = np.searchsorted(dense.steps, run.steps)
    np.testing.assert_array_equal(run["gradients/norm"].values, dense["gradients/norm"].values[rows])
    armed = run["scalars/armed"]
    of_step = dict(zip(armed.steps.tolist(), armed.values, strict=True))
    assert [step for step in run.steps.tolist() if of_step[step]] == [step for step in run.steps if step % 20]
    assert run["scalars/armed_by_loss"].values[33] == math.inf
    assert np.isnan(run["scalars/armed_by_loss"].values[34:]).all(), "it stays NaN, which is one event"


def test_looking_at_the_run_shows_what_is_recorded_so_far():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(model, optimizer=optimizer, every=4, arm=Arm(before=3)) as watch:
        for step in range(6):
            model(batch(step, {})).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert watch.run.steps.tolist() == [s for s in (0, 4) if s <= step]


@pytest.mark.parametrize("before", [0, 4])
def test_training_is_what_it_would_have_been(before):
    spikes = {20: 30.0, 45: 100.0}
    _, losses, weights = train(spikes, watched=False)
    watch, watched, same = train(spikes, every=30, arm=Arm(steps=7, z=8.0, before=before))
    assert watched == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert len(watch.run.steps) >= 2 + 14


def test_an_overflow_that_a_scaler_skips_is_no_event():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    with ks.watch(model, optimizer=optimizer, every=50, arm=Arm(on=(), steps=5)) as watch:
        for step in range(40):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(8, 4)).square().mean()).backward()
            if step == 30:
                model.weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() > 1024, "and a scale that grows is none either"
    assert watch.run.steps.tolist() == [0]


def test_the_file_says_why(tmp_path):
    train(
        {33: 30.0, 50: math.nan},
        path=tmp_path / "run.h5",
        every=20,
        arm=Arm(steps=5, z=8.0, on="loss", gradients=False),
    )
    with ks.open_run(tmp_path / "run.h5") as run:
        (note,) = run.notes
        assert note.startswith("10 steps were recorded beside the schedule, because of loss at step 33 (z = ")
        assert note.endswith(") and loss at step 50 (not finite).")
    assert note in ks.report(tmp_path / "run.h5").notes


def test_the_example_of_the_page():
    page = (Path(__file__).parents[1] / "docs" / "schedules.md").read_text(encoding="utf-8")
    code, shown = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL).groups()
    printed = io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        exec(compile(code, "schedules.md", "exec"), {})
    shape = re.compile(r"z = [\d.e+]+")  # the last digits depend on the processor
    assert shape.sub("z", printed.getvalue()) == shape.sub("z", shown)


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"z": 0.0}, {"z": math.nan}, {"before": -1}, {"least": 1}, {"window": 8}], ids=str
)
def test_unusable(options):
    with pytest.raises(UsageError, match="Arm needs"):
        Arm(**options)
