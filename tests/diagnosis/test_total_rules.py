from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.diagnosis import Severity, diagnose
from keelscope.store.memory import MemoryWriter
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, StatisticSpec


def run_of(norms, *, sizes=None, scalars=None):
    """Gradient norms ``[step][parameter]`` of p0, p1, ... and scalars ``name -> [step]``."""
    table = np.atleast_2d(np.asarray(norms, dtype=float))
    sizes = sizes or [10] * table.shape[1]
    sites = tuple(Site(f"p{i}", "Parameter", "parameter", numel=n) for i, n in enumerate(sizes))
    groups = (GroupSpec("parameter_gradients", (StatisticSpec("norm", "1", "norm"),), sites),)
    totals = np.sqrt(np.nansum(table**2, axis=1))
    scalars = {"grad_norm_total": totals} | (scalars or {})
    info = RunInfo("run", "id", "2026-01-01T00:00:00+00:00")
    writer = MemoryWriter(RunLayout(info, groups, tuple(scalars)))
    for step, row in enumerate(table):
        logged = {name: float(series[step]) for name, series in scalars.items()}
        writer.append(
            Row(step, 0.0, {"parameter_gradients": {"norm": row}}, logged, {"parameter_gradients": row == row})
        )
    return writer.run()


def found(run, rule, **options):
    return [finding for finding in diagnose(run, **options).findings if finding.rule == rule]


def test_a_spike_names_step_and_parameter():
    norms = np.ones((20, 3)) * np.linspace(1.0, 1.2, 20)[:, None]
    norms[14, 2] = 60.0
    (finding,) = found(run_of(norms), "spike")
    assert (finding.steps, finding.sites, finding.severity) == ((14, 14), ("p2",), Severity.WARNING)
    before = np.median(np.sqrt(3.0) * np.linspace(1.0, 1.2, 20)[6:14])
    assert finding.value == pytest.approx(np.sqrt(60.0**2 + 2 * norms[14, 0] ** 2) / before, rel=1e-4)


def test_the_highest_of_several_spikes_is_described():
    norms = np.ones((40, 2))
    norms[12], norms[30] = 50.0, 500.0
    (finding,) = found(run_of(norms), "spike")
    assert finding.steps == (12, 30)
    assert "2 steps; highest at step 30" in finding.statement
    assert finding.value == pytest.approx(500.0)


@pytest.mark.parametrize(
    "totals",
    [
        np.r_[np.ones(7), 50.0, np.ones(10)],
        np.r_[np.full(20, 1e-3), np.geomspace(1e-3, 1.0, 40)],
        10.0 ** np.random.default_rng(0).normal(0.0, 0.6, 60),
        np.r_[np.geomspace(1e3, 1e-3, 60)],
        np.r_[np.ones(20), np.full(5, 9.0)],
    ],
    ids=["too early", "slow growth", "noisy", "shrinking", "below ten times"],
)
def test_what_is_no_spike(totals):
    assert found(run_of(totals[:, None]), "spike") == []


def test_steps_that_were_skipped_and_norms_that_are_not_finite_are_no_spikes():
    norms = np.ones((30, 2))
    norms[15], norms[20] = 1e6, np.inf
    assert found(run_of(norms, scalars={"skipped": np.arange(30) == 15}), "spike") == []


def test_single_skipped_attempts_are_only_worth_knowing():
    (finding,) = found(run_of(np.ones((20, 2)), scalars={"skipped_attempts": [3, *[0] * 19]}), "overflow_step_skipped")
    assert (finding.severity, finding.value, finding.steps) == (Severity.INFO, 3.0, (0, 0))
    assert found(run_of(np.ones((20, 2)), scalars={"skipped_attempts": [0] * 20}), "overflow_step_skipped") == []


def test_overflow_that_does_not_end_is_a_warning():
    (finding,) = found(run_of(np.ones((20, 2)), scalars={"skipped_attempts": [2] * 20}), "overflow_step_skipped")
    assert (finding.severity, finding.value) == (Severity.WARNING, 40.0)
    assert "bfloat16" in finding.remedy


def trained(scale, steps, *, last_fits=True):
    """Attempts with a loss scaler, the first ones of which overflow."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with ks.watch(model, optimizer=optimizer) as watch:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean() * (1e3 if last_fits or step < steps - 1 else 1e37)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return watch.run


def test_attempts_that_the_scaler_skips_are_counted_beside_the_next_row():
    run = trained(2.0**128 * 0.99, 20)
    skipped = run["scalars/skipped_attempts"].values
    assert skipped[0] > 0
    assert len(run.steps) + skipped.sum() == 20
    assert set(skipped[1:]) == {0.0}
    report = diagnose(run)
    assert [f.rule for f in report.findings] == ["overflow_step_skipped"]
    assert report.headline != "non-finite"


def test_a_skipped_attempt_at_the_end_is_no_broken_step():
    run = trained(65536.0, 4, last_fits=False)
    assert run["scalars/skipped"].values.tolist() == [0.0, 0.0, 0.0, 1.0]
    report = diagnose(run)
    assert report.headline != "non-finite"
    assert [f.rule for f in report.findings] == ["overflow_step_skipped"]


def test_without_a_scaler_nothing_is_counted():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(model, optimizer=optimizer) as watch:
        for used in (True, False, True):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if used:
                optimizer.step()
    assert "scalars/skipped_attempts" not in watch.run
