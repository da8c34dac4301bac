"""Thresholds by name: every one changes a verdict, and wrong ones are refused in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from keelscope.diagnosis import diagnose
from keelscope.diagnosis.thresholds import DEFAULTS, THRESHOLDS, parsed, read_thresholds, thresholds_with
from keelscope.errors import UnknownNameError, UsageError

SOURCE = Path(__file__).parents[2] / "keelscope" / "diagnosis"


def sloped(total, n=32):
    return 1e-4 * 10.0 ** (total / n * np.arange(-n + 1, 1.0))


@pytest.mark.parametrize(
    ("total", "changes", "word"),
    [
        (2.5, {}, "vanishing"),
        (2.5, {"vanishing": 3.0}, "drifting"),
        (2.5, {"exploding": 3.0}, "vanishing"),
        (-2.5, {"exploding": 3.0}, "drifting"),
        (-2.5, {"vanishing": 3.0}, "exploding"),
        (0.6, {"drifting": 0.5}, "drifting"),
        (1.5, {"drifting": 1.6}, "flat"),
        (1.5, {"vanishing": 1.2}, "vanishing"),
    ],
)
def test_the_headline_follows(make_run, total, changes, word):
    report = diagnose(make_run(sloped(total)), thresholds=changes)
    assert report.headline == word
    rules = {finding.rule: finding for finding in report.findings}
    assert (word in rules) == (word in {"vanishing", "exploding"})
    if word in rules:
        assert abs(rules[word].threshold) == {**DEFAULTS, **changes}[word]


@pytest.mark.parametrize(("limit", "found"), [(1.0, True), (3.0, False)])
def test_a_rule_follows(make_run, limit, found):
    values = np.where(np.arange(32) < 20, 1e-6, 1e-4)
    report = diagnose(make_run(values), thresholds={"knee": limit})
    assert ("knee" in {finding.rule for finding in report.findings}) == found


def test_a_report_says_what_was_changed(make_run):
    run = make_run(sloped(0))
    assert "Thresholds differ from their defaults: vanishing = 3." in diagnose(run, thresholds={"vanishing": 3.0}).notes
    assert not any("differ" in note for note in diagnose(run).notes)


def test_every_threshold_is_read_by_a_rule():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py") if path.stem != "thresholds")
    used = set(re.findall(r'thresholds\["(\w+)"\]', sources)) | {"vanishing", "exploding"}
    assert used == {threshold.name for threshold in THRESHOLDS}


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "3"])
def test_a_value_that_cannot_be_used_is_refused(value):
    with pytest.raises(UsageError, match="give a number above 0"):
        thresholds_with({"knee": value})


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="no threshold 'vanish'; use vanishing"):
        thresholds_with({"vanish": 3.0})


@pytest.mark.parametrize("text", ["vanishing", "vanishing=", "vanishing=three"])
def test_a_setting_needs_a_number(text):
    with pytest.raises(UsageError, match="write NAME=VALUE"):
        parsed([text])


@pytest.mark.parametrize("table", ["[thresholds]", "[tool.keelscope.thresholds]"])
def test_a_file_holds_a_table(tmp_path, table):
    path = tmp_path / "limits.toml"
    path.write_text(f"{table}\nvanishing = 3\nknee = 1.5\n")
    assert thresholds_with(read_thresholds(path))["knee"] == 1.5
    assert read_thresholds(path) == {"vanishing": 3, "knee": 1.5}


@pytest.mark.parametrize("content", ["vanishing = 3", "[thresholds", "[tool.other]\nx = 1"])
def test_a_file_without_one_is_refused(tmp_path, content):
    path = tmp_path / "limits.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"limits\.toml"):
        read_thresholds(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_thresholds(tmp_path / "none.toml")
