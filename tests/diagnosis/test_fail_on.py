"""What fails a check, from Python; tests/cli/test_report.py has the same words on the command line."""

from __future__ import annotations

import numpy as np
import pytest

from keelscope.diagnosis import diagnose
from keelscope.diagnosis.fail_on import fail_words, matched
from keelscope.errors import HealthError, KeelscopeError, UnknownNameError, UsageError


def sloped(total, n=32):
    return 1e-4 * 10.0 ** (total / n * np.arange(-n + 1, 1.0))


@pytest.fixture
def vanishing(make_run):
    return diagnose(make_run(sloped(4.0), variance=np.geomspace(1, 200, 32), title="deep"))


@pytest.mark.parametrize(
    ("words", "holds"),
    [
        ("vanishing", ["vanishing"]),
        ("flat,exploding", []),
        ("error", ["error"]),
        (["info", "warning", "error"], ["info", "warning", "error"]),
        ("variance_growth, flat", ["variance_growth"]),
    ],
)
def test_words(vanishing, words, holds):
    assert matched(vanishing, fail_words(words)) == holds


def test_a_severity_holds_of_graver_findings_only(make_run):
    warned = diagnose(make_run(sloped(0), variance=np.geomspace(1, 200, 32)))
    assert matched(warned, ("info", "warning", "error")) == ["info", "warning"]
    assert warned.check() is warned
    with pytest.raises(HealthError, match="variance_growth"):
        warned.check(fail_on="warning")


def test_the_message_has_verdict_finding_and_remedy(vanishing):
    with pytest.raises(AssertionError) as failure:
        vanishing.check()
    lines = str(failure.value).splitlines()
    assert isinstance(failure.value, KeelscopeError)
    assert lines[0] == "deep is vanishing: the check fails on error."
    assert lines[1] == vanishing.sentence
    assert lines[2].startswith("error vanishing: The gradient RMS shrinks by a fitted x")
    assert lines[3].startswith("    Give the gradient a shortcut")
    assert not any("variance_growth" in line for line in lines)


def test_unknown_words(vanishing):
    with pytest.raises(UnknownNameError, match="fail_on 'vanish' is no headline, rule or severity; use vanishing"):
        vanishing.check(fail_on="vanish")


@pytest.mark.parametrize("nothing", ["", ",", " , ", [], [""]])
def test_a_check_that_nothing_can_fail_is_refused(nothing):
    with pytest.raises(UsageError, match="fail_on is empty"):
        fail_words(nothing)
