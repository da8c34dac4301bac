"""`Finding`: one thing a rule has to say, with the number, the threshold and the remedy.

Made by the rules in `keelscope.diagnosis.rules`, collected in a `keelscope.diagnosis.report.Report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Finding", "Severity", "name_sites"]


class Severity(IntEnum):
    """How much a finding matters; comparable, ``INFO < WARNING < ERROR``."""

    INFO = 0
    """Worth knowing; nothing to do."""
    WARNING = 1
    """Probably not intended."""
    ERROR = 2
    """Training is impaired."""

    @property
    def label(self) -> str:
        """The name in lower case, as written in reports and in ``--fail-on``."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rule found."""

    rule: str
    """Name of the rule, e.g. ``"vanishing"``."""
    severity: Severity
    statement: str
    """One sentence: what was measured, where, against which threshold."""
    sites: tuple[str, ...] = ()
    """Paths concerned, input side first; empty for the model as a whole."""
    steps: tuple[int, int] | None = None
    """First and last recorded step it was seen on."""
    value: float = float("nan")
    """The measured number; NaN where there is none."""
    threshold: float = float("nan")
    """What `value` was compared with."""
    remedy: str = ""
    """One sentence: what usually helps."""

    def __str__(self) -> str:
        return f"{self.severity.label}: {self.rule}: {self.statement}"


def name_sites(paths: Sequence[str], limit: int = 3) -> str:
    """Paths as they are read in a sentence.

    Args:
        paths: dotted paths.
        limit: how many are written out.

    Returns:
        The first ones, and how many more there are.

    Example:
        >>> name_sites(["a", "b", "c", "d"], limit=2)
        'a, b and 2 more'
    """
    names = [path or "(model)" for path in paths]
    if len(names) > limit:
        return f"{', '.join(names[:limit])} and {len(names) - limit} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
