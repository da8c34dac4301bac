"""The rule set ``classic``: each limit on a run made by hand, just inside and just beyond."""

from __future__ import annotations

import re

import numpy as np
import pytest

from keelscope.diagnosis import diagnose
from keelscope.diagnosis.rules import CLASSIC, RULES, rule_name, rules_of
from keelscope.errors import UnknownNameError

N = 8


def found(run):
    return {finding.rule: finding for finding in diagnose(run, rules="classic").findings}


@pytest.mark.parametrize("rule", CLASSIC, ids=rule_name)
def test_every_rule_says_formula_source_and_remedy(rule):
    for part in ("Formula:", "Source:", "Remedy:"):
        assert re.search(part, rule.__doc__), part


def test_the_sets_share_no_name():
    assert {rule_name(rule) for rule in CLASSIC}.isdisjoint(map(rule_name, RULES))
    assert rules_of("classic") == CLASSIC
    with pytest.raises(UnknownNameError, match="no rule set 'classical'; use default or classic"):
        rules_of("classical")


def test_the_headline_is_the_same_and_a_note_tells_the_set(make_run):
    run = make_run(np.ones(N), parameter=np.full(N, 1e-9))
    default, classic = diagnose(run), diagnose(run, rules="classic")
    assert default.sentence == classic.sentence
    assert {finding.rule for finding in default.findings}.isdisjoint(finding.rule for finding in classic.findings)
    assert any("rule set classic" in note for note in classic.notes)


def sizes(rms):
    """Edits a run so that every parameter gradient has this RMS."""

    def edit(k, values, observed):
        values["parameter_gradients"]["rms"][:] = rms

    return edit


@pytest.mark.parametrize(
    ("rms", "rules"),
    [
        (1.0, set()),
        (1e6, {"classic_large_gradient"}),
        (9e5, set()),
        (1.1e-6, set()),
        (9e-7, {"classic_small_gradient"}),
        (9e-8, {"classic_small_gradient", "classic_vanishing_gradient"}),
        (0.0, {"classic_small_gradient", "classic_vanishing_gradient", "classic_all_zero"}),
    ],
)
def test_sizes_of_parameter_gradients(make_run, rms, rules):
    names = {"classic_small_gradient", "classic_vanishing_gradient", "classic_large_gradient", "classic_all_zero"}
    assert set(found(make_run(np.ones(N), edit=sizes(rms)))) & names == rules


@pytest.mark.parametrize(
    ("first", "rule"),
    [(71.0, "classic_first_over_last"), (69.0, None), (1e-5, "classic_first_against_last"), (2e-3, None)],
)
def test_first_and_last_weight(make_run, first, rule):
    def edit(k, values, observed):
        norms = values["parameter_gradients"]["norm"]
        norms[:] = 1.0
        norms[0] = first

    names = {"classic_first_over_last", "classic_first_against_last"}
    assert set(found(make_run(np.ones(N), edit=edit))) & names == ({rule} if rule else set())


def test_nan_anywhere(make_run):
    def edit(k, values, observed):
        values["outputs"]["nonfinite_count"][3] = 1

    finding = found(make_run(np.ones(N), edit=edit))["classic_exploding_tensor"]
    assert finding.sites == ("layers.2",)


@pytest.mark.parametrize(("loss", "expected"), [(999.0, False), (1000.0, True), (float("nan"), True)])
def test_the_loss(make_run, loss, expected):
    assert ("classic_loss" in found(make_run(np.ones(N), scalars={"loss": [loss]}))) == expected


def test_the_norm_of_an_output_gradient_moves_with_the_loss_and_the_verdict_does_not(make_run):
    small, large = (make_run(np.full(N, scale)) for scale in (1.0, 1e6))
    assert "classic_exploding_operation" not in found(small)
    assert "classic_exploding_operation" in found(large)
    assert diagnose(small).headline == diagnose(large).headline == "flat"
