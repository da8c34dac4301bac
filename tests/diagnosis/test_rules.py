from __future__ import annotations

import json
import re

import numpy as np
import pytest

from keelscope import plugins
from keelscope.diagnosis import Finding, Severity, diagnose
from keelscope.diagnosis.rules import RULES, all_rules, rule_name
from keelscope.errors import PluginWarning


def third_party(evidence):
    """Always finds something."""
    yield Finding("third_party", Severity.WARNING, f"Depth {evidence.axis.length:g}.")


def broken(evidence):
    """Always fails."""
    raise KeyError("gate")


def installed(monkeypatch, *rules):
    monkeypatch.setattr(
        plugins, "load", lambda group: [("pkg", rule) for rule in rules] if group == "keelscope.rules" else []
    )


def test_names_are_those_of_the_functions():
    assert [rule_name(rule) for rule in RULES] == [
        "nonfinite_forward",
        "nonfinite_backward",
        "exploding",
        "vanishing",
        "knee",
        "uniformly_small",
        "variance_growth",
        "shortcut_attenuated",
        "residual_absorbed",
        "idle_depth",
        "norm_kills_gradient",
        "rank_collapse",
        "gate_dead",
        "gate_closed",
        "saturated",
        "zero_grad_by_init",
        "zero_grad_stuck",
        "dead_units",
        "zero_gradient",
        "spike",
        "overflow_step_skipped",
        "update_ratio",
        "dominated_by_one_parameter",
        "no_backward",
        "disconnected",
        "frozen",
        "never_called",
        "unregistered_parameters",
        "coverage_gap",
    ]


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
def test_every_rule_says_formula_source_and_remedy(rule):
    for part in ("Formula:|S = |As `vanishing`", "Source:", "Remedy:"):
        assert re.search(part, rule.__doc__), part


def test_installed_rules_come_after_the_built_in_ones_and_once(monkeypatch):
    installed(monkeypatch, RULES[0], third_party)
    assert all_rules() == (*RULES, third_party)


def test_an_installed_rule_is_asked(monkeypatch, make_run):
    installed(monkeypatch, third_party)
    (finding,) = diagnose(make_run(np.ones(8))).findings
    assert str(finding) == "warning: third_party: Depth 8."


def test_a_finding_with_an_infinite_value_is_still_json(monkeypatch, make_run):
    def endless(evidence):
        """Finds infinity."""
        yield Finding("endless", Severity.INFO, "", value=float("-inf"))

    installed(monkeypatch, endless)
    (finding,) = json.loads(diagnose(make_run(np.ones(8))).to_json())["findings"]
    assert (finding["value"], finding["threshold"]) == ("-Infinity", None)


def test_a_rule_that_fails_is_left_out_with_a_warning(monkeypatch, make_run):
    installed(monkeypatch, broken, third_party)
    with pytest.warns(PluginWarning, match=r"rule broken is left out: it failed with KeyError: 'gate'"):
        report = diagnose(make_run(np.ones(8)))
    assert [finding.rule for finding in report.findings] == ["third_party"]


def test_severities_compare():
    assert Severity.INFO < Severity.WARNING < Severity.ERROR
    assert [severity.label for severity in Severity] == ["info", "warning", "error"]
