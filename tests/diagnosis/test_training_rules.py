"""Rules on single parameters."""

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
