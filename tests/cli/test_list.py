"""`keelscope list` names what is installed."""

from __future__ import annotations

import json

import pytest
import torch

import keelscope as ks
from keelscope.models import build


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("probes", {"outputs", "gradients", "parameters", "parameter_gradients", "updates"}),
        ("statistics", {"outputs/variance", "outputs/kurtosis", "gradients/rms", "gradients/late_token_level"}),
        ("rules", {"vanishing", "exploding", "classic_loss"}),
        ("thresholds", {"vanishing", "knee"}),
        ("schemes", {"keel", "post_ln", "pre_ln"}),
    ],
)
def test_names(keelscope, kind, names):
    code, out, _ = keelscope("list", kind, "--json")
    rows = json.loads(out)
    assert code == 0
    assert names <= {row["name"] for row in rows}
    assert all(row["name"] and len(row) > 1 for row in rows)
    table = keelscope("list", kind).out
    assert all(name in table for name in names)


def test_every_rule_and_scheme_says_what_it_means(keelscope):
    for kind in ("rules", "schemes"):
        rows = json.loads(keelscope("list", kind, "--json").out)
        assert [row["name"] for row in rows if len(row["meaning"]) < 20] == []


def test_statistics_have_the_names_they_have_in_a_file(keelscope):
    rows = json.loads(keelscope("list", "statistics", "--json").out)
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names))
    model, probes = build("keel", depth=4, width=8, heads=2, vocabulary=20), "default,sublayers,norms,tokens,jacobians"
    report = ks.report(model, torch.arange(12).reshape(2, 6), lambda output, _: output.square().mean(), probes=probes)
    recorded = {key for key in report.run.keys() if key.partition("/")[0] != "scalars"}  # noqa: SIM118
    assert "sublayers/branch_gain" in recorded
    assert recorded <= set(names)
