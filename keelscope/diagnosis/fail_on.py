"""What fails a check: headlines, rules and severities by name, shared by ``--fail-on`` and `Report.check`."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from keelscope.diagnosis.finding import Finding, Severity
from keelscope.diagnosis.headline import WORDS
from keelscope.diagnosis.rules import SETS, rule_name, rules_of
from keelscope.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from keelscope.diagnosis.record import Diagnosis

__all__ = ["complaint", "fail_words", "matched"]


def fail_words(fail_on: str | Sequence[str], *, option: str = "fail_on") -> tuple[str, ...]:
    """The words of a condition, each a headline, a rule or a severity.

    Args:
        fail_on: words, or one text with commas between them.
        option: what the user calls it, for the message.

    Returns:
        The words.

    Raises:
        UnknownNameError: if a word is nothing that a report could hold.
        UsageError: if there is none: a variable that is not set would let every run pass.

    Example:
        >>> fail_words("vanishing, error")
        ('vanishing', 'error')
    """
    parts = fail_on.split(",") if isinstance(fail_on, str) else fail_on
    words = tuple(word.strip() for word in parts if word.strip())
    if not words:
        raise UsageError(f"{option} is empty, so that nothing could fail; give a headline, a rule or a severity.")
    known = _known()
    for word in words:
        if word not in known:
            near = ", ".join(get_close_matches(word, known, n=3) or known)
            raise UnknownNameError(f"{option} {word!r} is no headline, rule or severity; use {near}.")
    return words


def _known() -> list[str]:
    rules = (rule_name(rule) for name in SETS for rule in rules_of(name))
    return list(dict.fromkeys([*WORDS, *(severity.label for severity in Severity), *rules]))


def matched(report: Diagnosis, words: Sequence[str]) -> list[str]:
    """The words that hold of a report; a severity also holds of every graver finding.

    Args:
        report: the report.
        words: from `fail_words`.

    Returns:
        Some of the words, in their order.
    """
    return [word for word in words if word == report.headline or any(_meets(f, word) for f in report.findings)]


def _meets(finding: Finding, word: str) -> bool:
    severity = next((severity for severity in Severity if severity.label == word), None)
    return finding.rule == word or (severity is not None and finding.severity >= severity)


def complaint(report: Diagnosis, words: Sequence[str]) -> str:
    """Why a report fails a check, with the verdict and the findings that match.

    Args:
        report: the report.
        words: those that `matched`.

    Returns:
        A few lines.
    """
    lines = [f"{report.title} is {report.headline}: the check fails on {', '.join(words)}.", report.sentence]
    for finding in report.findings:
        if finding.rule == report.headline or any(_meets(finding, word) for word in words):
            lines.append(f"{finding.severity.label} {finding.rule}: {finding.statement}")
            lines += [f"    {finding.remedy}"] if finding.remedy else []
    return "\n".join([*lines, *([report.explanation] if report.explanation else [])])
