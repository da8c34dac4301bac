"""`Verdict`: what a report says about a run, as plain values for the page; `Judge` makes them in the background.

All judgement comes from `keelscope.diagnosis`; here its words and numbers are only laid out: one headline, one
sentence, three numbers, and findings with the place on the page they lead to.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keelscope.diagnosis.report import diagnose
from keelscope.errors import RunFileError
from keelscope.formatting import count
from keelscope_dashboards.wording import typeset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope.diagnosis.finding import Finding
    from keelscope.diagnosis.report import Report
    from keelscope_dashboards.followed import FollowedRun

__all__ = ["PENDING", "Figure", "Judge", "Note", "Verdict", "verdict_of", "word_of"]

PAUSE_SECONDS = 2.0
MINUS, TIMES = "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number on a verdict card."""

    label: str
    value: str
    hint: str
    """What it is, in a sentence."""


@dataclass(frozen=True, slots=True)
class Note:
    """One finding and where to look at it."""

    rule: str
    severity: str
    statement: str
    remedy: str
    site: str = ""
    """Path of the first layer concerned."""
    step: int = -1
    """Last step it was seen on; -1 when it has none."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A report in the words of the page."""

    headline: str
    sentence: str
    figures: tuple[Figure, ...] = ()
    notes: tuple[Note, ...] = ()


PENDING = Verdict("pending", "Reading the run.")
WORDS = {
    "flat": ("Flat", "good", "check"),
    "drifting": ("Drifting", "warn", "up-right"),
    "vanishing": ("Vanishing", "bad", "down"),
    "exploding": ("Exploding", "bad", "up"),
    "dead": ("Dead", "bad", "cross"),
    "non-finite": ("Non-finite", "bad", "alert"),
    "not enough data": ("Not enough data", "idle", "dots"),
    "pending": ("Reading", "idle", "dots"),
    "error": ("Cannot be read", "bad", "alert"),
    "damaged": ("Damaged", "bad", "alert"),
    "not judged": ("Not judged", "idle", "alert"),
}
"""Headline: text, tone, icon."""


def word_of(verdict: Verdict) -> tuple[str, str, str]:
    """A headline as a pill shows it; a level gradient beside an error is no good news.

    Args:
        verdict: of one run.

    Returns:
        Text, tone and icon.

    Example:
        >>> word_of(Verdict("flat", ""))
        ('Flat', 'good', 'check')
        >>> word_of(Verdict("flat", "", notes=(Note("gate_dead", "error", "", ""),)))
        ('Flat, 1 error', 'warn', 'alert')
    """
    word, tone, symbol = WORDS.get(verdict.headline, (verdict.headline, "idle", "dots"))
    errors = sum(note.severity == "error" for note in verdict.notes)
    if tone == "good" and errors:
        return f"{word}, {count(errors, 'error')}", "warn", "alert"
    return word, tone, symbol


def verdict_of(report: Report) -> Verdict:
    """Lay out a report.

    Args:
        report: of one run.

    Returns:
        Its verdict.
    """
    findings = sorted(report.findings, key=lambda finding: -int(finding.severity))
    notes = tuple(_note(finding) for finding in findings)
    return Verdict(report.headline, typeset(report.sentence), _figures(report), notes)


def _note(finding: Finding) -> Note:
    return Note(
        finding.rule,
        finding.severity.label,
        typeset(finding.statement),
        typeset(finding.remedy),
        finding.sites[0] if finding.sites else "",
        finding.steps[1] if finding.steps else -1,
    )


def _figures(report: Report) -> tuple[Figure, ...]:
    on_axis = [layer for layer in report.layers if layer.depth is not None]
    variance = _ends([layer.output_variance for layer in on_axis])[::-1]
    grows = "Output variance of the last layer divided by that of the first."
    figures = [*_profile_figures(report), _ratio("Var. out ÷ in", variance, grows)]
    return tuple(figure for figure in figures if figure is not None)


def _profile_figures(report: Report) -> list[Figure | None]:
    """The two numbers of the profile that decided."""
    profile = report.profile
    if profile is None or math.isnan(profile.shape.total):
        return []
    name = profile.title[0].upper() + profile.title[1:]
    lost = f"{profile.shape.total:+.2f}".replace("-", MINUS)
    levels = _ends(profile.shape.levels.tolist())
    ends = (
        f"{name} of the first layer over that of the last, end to end. "
        "The factor in the sentence follows from the slope, which is fitted to the middle of the depth."
    )
    return [
        Figure("Decades lost", lost, f"{name}: slope times depth, positive when it shrinks towards the input."),
        _ratio("First ÷ last", tuple(10**level for level in levels), ends),
    ]


def _ends(values: Sequence[float | None]) -> tuple[float, ...]:
    """The first and the last finite value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return (known[0], known[-1]) if len(known) > 1 else ()


def _ratio(label: str, ends: tuple[float, ...], hint: str) -> Figure | None:
    if not ends or ends[1] == 0:
        return None
    return Figure(label, times(ends[0] / ends[1]), hint)


def times(ratio: float) -> str:
    """A ratio as it is read: three digits, or a power of ten when it is far from 1.

    Args:
        ratio: not negative.

    Returns:
        Text with the sign for "times".

    Example:
        >>> times(0.934), times(15.84), times(298.3), times(3.1e-13), times(0.0)
        ('0.93×', '15.8×', '298×', '3×10⁻¹³', '0×')
    """
    if ratio == 0 or 0.001 <= ratio < 10_000:
        digits = 0 if ratio == 0 or ratio >= 100 else 1 if ratio >= 10 else 2 if ratio >= 0.1 else 3
        return f"{ratio:,.{digits}f}{TIMES}"
    mantissa, exponent = f"{ratio:.0e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{power}" if mantissa == "1" else f"{mantissa}{TIMES}10{power}"


@dataclass(slots=True)
class _Case:
    """What is known about one run."""

    verdict: Verdict = PENDING
    revision: int = -1
    asked: float = -math.inf
    report: Report | None = None
    work: Future[tuple[Verdict, Report | None]] | None = None


class Judge:
    """Diagnoses runs one after the other in a background thread, a live one at most every two seconds."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keelscope-judge")
        self._cases: dict[str, _Case] = {}

    def verdict(self, run_id: str, source: FollowedRun) -> Verdict:
        """The latest verdict on a run; a newer one is started when the run has grown.

        Args:
            run_id: its id.
            source: the run.

        Returns:
            The verdict, `PENDING` before the first is ready.
        """
        if source.status == "waiting":
            return PENDING
        case = self._cases.setdefault(run_id, _Case())
        if case.work is not None and case.work.done():
            (case.verdict, case.report), case.work = case.work.result(), None
        due = time.monotonic() - case.asked >= PAUSE_SECONDS
        if case.work is None and due and case.revision != source.revision:
            case.revision, case.asked = source.revision, time.monotonic()
            case.work = self._pool.submit(_judged, source)
        return case.verdict

    def report(self, run_id: str) -> Report | None:
        """The report that the latest verdict was taken from.

        Args:
            run_id: its id.

        Returns:
            The report, None before the first is ready. Its run is closed: what it has read stays valid.
        """
        case = self._cases.get(run_id)
        return None if case is None else case.report

    def close(self) -> None:
        """Stop the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _judged(source: FollowedRun) -> tuple[Verdict, Report | None]:
    try:
        with source.opened() as run:
            report = diagnose(run)
            return verdict_of(report), report
    except (RunFileError, OSError) as error:
        return Verdict("damaged", f"Part of the file cannot be read: {source.told(error)}"), None
    except Exception as error:  # one odd run must not take the verdicts of the others with it
        return Verdict("not judged", f"The run could not be diagnosed: {source.told(error)}"), None
