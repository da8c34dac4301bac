"""`keelscope list` names what is installed."""

from __future__ import annotations

import json

import pytest


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
