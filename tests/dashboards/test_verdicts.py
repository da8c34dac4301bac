"""Verdicts: a report laid out, and the judge that makes them beside the page."""

from __future__ import annotations

import time
from types import ModuleType

import pytest

from keelscope.diagnosis.report import diagnose
from keelscope.errors import RunFileError
from keelscope_dashboards import verdicts
from keelscope_dashboards.verdicts import MINUS, PENDING, Judge, verdict_of
from keelscope_dashboards.wording import typeset


def test_the_numbers_are_those_of_the_report(kit: ModuleType) -> None:
    report = diagnose(kit.memory_run("post_ln"))
    verdict = verdict_of(report)
    lost, ratio, variance = verdict.figures
    assert verdict.headline == report.headline == "vanishing"
    assert verdict.sentence == typeset(report.sentence)
    assert report.profile is not None
    assert (lost.label, ratio.label, variance.label) == ("Decades lost", "First ÷ last", "Var. out ÷ in")
    assert "fitted to the middle of the depth" in ratio.hint
    assert float(lost.value) == pytest.approx(report.profile.shape.total, abs=0.005)
    levels = report.profile.shape.levels
    power = ratio.value.partition("10")[2].translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
    assert int(power) == pytest.approx(levels[0] - levels[-1], abs=1)
    assert 0.9 < float(variance.value[:-1]) < 1.1
    assert verdict.notes[0].rule == "vanishing"
    assert verdict.notes[0].site == "sublayers.0"


def test_a_loss_towards_the_output_has_a_minus(kit: ModuleType) -> None:
    assert verdict_of(diagnose(kit.memory_run("pre_ln"))).figures[0].value.startswith(MINUS)


def test_a_run_without_a_slope_has_no_numbers_of_one(kit: ModuleType) -> None:
    verdict = verdict_of(diagnose(kit.memory_run("keel", layers=1, steps=1)))
    assert verdict.headline == "not enough data"
    assert "Decades lost" not in [figure.label for figure in verdict.figures]


class Source:
    """What the judge needs of a run."""

    def __init__(self, kit: ModuleType) -> None:
        self.kit, self.revision, self.broken, self.opens = kit, 1, False, 0
        self.status, self.error = "finished", RuntimeError("a bug in a rule of somebody else")

    def opened(self) -> object:
        self.opens += 1
        if self.broken:
            raise self.error
        return self.kit.memory_run("keel", layers=8, steps=4)

    def told(self, error: Exception) -> str:
        return str(error)


def settled(judge: Judge, source: Source, headline: str) -> verdicts.Verdict:
    for _ in range(500):
        verdict = judge.verdict("id", source)  # type: ignore[arg-type]
        if verdict.headline == headline:
            return verdict
        time.sleep(0.01)
    raise AssertionError(f"never {headline}")


def test_a_verdict_is_made_once_per_revision(kit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "PAUSE_SECONDS", 0.0)
    judge, source = Judge(), Source(kit)
    assert judge.verdict("id", source) is PENDING  # type: ignore[arg-type]
    settled(judge, source, "flat")
    for _ in range(5):
        judge.verdict("id", source)  # type: ignore[arg-type]
    judge.close()
    assert source.opens == 1


def test_a_failing_diagnosis_is_a_sentence_and_the_next_revision_is_tried(
    kit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "PAUSE_SECONDS", 0.0)
    judge, source = Judge(), Source(kit)
    source.broken = True
    failed = settled(judge, source, "not judged")
    assert failed.sentence == "The run could not be diagnosed: a bug in a rule of somebody else"
    source.error, source.revision = RunFileError("a chunk of gradients/rms is damaged"), 2
    damaged = settled(judge, source, "damaged")
    assert damaged.sentence == "Part of the file cannot be read: a chunk of gradients/rms is damaged"
    assert verdicts.word_of(damaged) == ("Damaged", "bad", "alert")
    source.broken, source.revision = False, 3
    settled(judge, source, "flat")
    judge.close()
