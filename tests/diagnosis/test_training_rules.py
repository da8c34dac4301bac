"""Rules on single steps and single parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.diagnosis import Severity, diagnose

FLAT = np.ones(8)


def found(run, rule, **options):
    return [f for f in diagnose(run, **options).findings if f.rule == rule]


def norms(*values):
    """A run whose total gradient norm is as given; its profile is flat."""
    return {"grad_norm_total": values}


@pytest.mark.parametrize(("last", "severity"), [(1.9, None), (3.0, Severity.INFO), (100.0, Severity.WARNING)])
def test_a_spike_leaves_its_own_history(make_run, last, severity):
    history = [*np.exp(0.1 * np.random.default_rng(0).standard_normal(40)), last, 1.0]
    run = make_run(np.tile(FLAT, (42, 1)), scalars=norms(*history))
    spikes = found(run, "spike")
    assert [(f.severity, f.steps) for f in spikes] == ([] if severity is None else [(severity, (400, 400))])
    assert found(run, "spike", thresholds={"spike": 100.0}) == []


def test_a_spike_needs_a_history_and_is_over_ten_rows_later(make_run):
    assert found(make_run(np.tile(FLAT, (8, 1)), scalars=norms(*[1.0] * 7, 100.0)), "spike") == []
    run = make_run(np.tile(FLAT, (42, 1)), scalars=norms(*[1.0] * 20, 100.0, *[1.0] * 21))
    assert found(run, "spike") == []
    assert len(found(run, "spike", step=250)) == 1


@pytest.mark.parametrize(("flags", "severity"), [((0, 1, 0, 0), Severity.INFO), ((0, 1, 1, 0), Severity.WARNING)])
def test_skipped_steps_are_counted(make_run, flags, severity):
    run = make_run(np.tile(FLAT, (4, 1)), scalars={"skipped": flags})
    (finding,) = found(run, "overflow_step_skipped")
    assert (finding.severity, finding.value) == (severity, sum(flags))


def test_one_parameter_that_owns_the_norm_is_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    ids = torch.arange(20)

    def rules():
        report = ks.report(model, ids, lambda output, _: (output - 1).square().mean())
        return {f.rule: f for f in report.findings}

    assert "dominated_by_one_parameter" not in rules()
    with torch.no_grad():
        model[0].weight[0] *= 1e-4
    finding = rules()["dominated_by_one_parameter"]
    assert (finding.severity, finding.sites) == (Severity.INFO, ("0.weight",))


@pytest.mark.parametrize(("rate", "words"), [(30.0, "above 0.1"), (1e-2, None), (1e-9, "below 1e-06")])
def test_updates_against_the_weights(rate, words):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    with ks.watch(model, optimizer=optimizer, probes=["default", "updates"]) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
        ratios = found(watch.run, "update_ratio")
    assert [words in f.statement for f in ratios] == ([True] if words else [])
