"""`SideBySide`: 2 to 8 diagnoses on one depth axis, as a frozen record.

`keelscope.diagnosis.report.Comparison` adds how it is printed; the common axis comes from `keelscope.analysis.compare`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Self

import numpy as np

from keelscope.analysis.compare import MAX_PROFILES, CommonDepth, common_depth
from keelscope.analysis.profile import DepthProfile, depth_profile
from keelscope.diagnosis.evidence import LATE_TOKENS
from keelscope.diagnosis.headline import worst_of
from keelscope.errors import UsageError
from keelscope.formatting import number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.diagnosis.record import Diagnosis

__all__ = ["SideBySide"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SideBySide:
    """Several runs over depth."""

    reports: tuple[Diagnosis, ...]
    titles: tuple[str, ...]
    """One per run, all different."""
    gradient: CommonDepth
    """Levels of the whole-tensor output gradient ``[run, bin]``."""
    late_tokens: CommonDepth | None
    """Levels of the late-token gradient; None when no run has one."""

    @classmethod
    def of(cls, reports: Sequence[Diagnosis], *, bins: int = 16, titles: Sequence[str] = ()) -> Self:
        """Put diagnoses on one depth axis.

        Args:
            reports: 2 to 8 of them.
            bins: largest number of depth rows.
            titles: what each is called; by default its own title.

        Returns:
            The comparison.

        Raises:
            UsageError: for fewer than 2 or more than 8.
        """
        if not 2 <= len(reports) <= MAX_PROFILES:
            raise UsageError(f"{len(reports)} runs were given; a comparison takes 2 to {MAX_PROFILES}.")
        path = _told_of(reports)
        gradient = common_depth([_whole(_stack_of(report, path)) for report in reports], bins)
        late = [_late(_stack_of(report, path)) for report in reports]
        some = any(np.isfinite(shape.levels).any() for shape in late)
        return cls(
            tuple(reports),
            _distinct(titles or [report.title for report in reports]),
            gradient,
            common_depth(late, bins) if some else None,
        )

    def to_dict(self) -> dict[str, object]:
        """The comparison as JSON values; null where nothing was observed.

        Returns:
            ``axis``, ``edges``, and per run its title, headline, sentence, S by profile and levels in decades.
        """
        late = self.late_tokens
        runs = [
            {
                "title": title,
                "headline": report.headline,
                "sentence": report.sentence,
                "decided_by": report.verdict.decided_by or None,
                "total": {key: _known(profile.shape.total) for key, profile in report.profiles.items()},
                "gradient": [_known(level) for level in self.gradient.levels[i]],
                "late_tokens": None if late is None else [_known(level) for level in late.levels[i]],
            }
            for i, (title, report) in enumerate(zip(self.titles, self.reports, strict=True))
        ]
        return {"axis": self.gradient.axis, "edges": self.gradient.edges.tolist(), "runs": runs}

    def to_json(self, *, indent: int | None = 2) -> str:
        """`to_dict` as strict JSON text.

        Args:
            indent: spaces per level; None for one line.

        Returns:
            The text.
        """
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_markdown(self) -> str:
        """Verdicts and depth table in Markdown.

        Returns:
            The text.
        """
        lines = ["| run | headline | S | sentence |", "|---|---|---:|---|"]
        lines += [
            f"| {title} | {report.headline} | {report.total} | {report.sentence} |"
            for title, report in zip(self.titles, self.reports, strict=True)
        ]
        lines += ["", f"| {self.gradient.axis} | {' | '.join(self.titles)} |", f"|---{'|---:' * len(self.titles)}|"]
        for b, label in enumerate(self.labels()):
            cells = [number(None if np.isnan(v) else 10.0**v) for v in self.gradient.levels[:, b]]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        return "\n".join([*lines, "", "Output-gradient RMS, median over recent steps; output side last.", ""])

    def labels(self) -> list[str]:
        """One label per depth row, e.g. ``1-4``, or ``0-6 %`` on relative depth."""
        edges = self.gradient.edges
        if self.gradient.axis == "depth":
            first = [f"{low + 1:g}" for low in edges[:-1]]
            return [a if a == f"{high:g}" else f"{a}-{high:g}" for a, high in zip(first, edges[1:], strict=True)]
        return [f"{100 * low:.0f}-{100 * high:.0f} %" for low, high in pairwise(edges)]


def _told_of(reports: Sequence[Diagnosis]) -> str:
    """The stack of the first headline that is not about the main one, if every run has it; else empty."""
    beside = [worst_of(report.stacks).path for report in reports if worst_of(report.stacks).chain is not _main(report)]
    everywhere = (path for path in beside if all(any(v.path == path for v in report.stacks) for report in reports))
    return next(everywhere, "")


def _stack_of(report: Diagnosis, path: str) -> Evidence:
    """The run along a stack, or along its main one."""
    found = (verdict.chain for verdict in report.stacks if path and verdict.path == path)
    return next(found, _main(report))


def _main(report: Diagnosis) -> Evidence:
    return report.stacks[0].chain


def _whole(chain: Evidence) -> DepthProfile:
    found = [profile.shape for key, profile in chain.profiles.items() if key != LATE_TOKENS]
    return found[0] if found else _nothing(chain)


def _late(chain: Evidence) -> DepthProfile:
    profile = chain.profiles.get(LATE_TOKENS)
    return profile.shape if profile is not None and profile.counted else _nothing(chain)


def _nothing(chain: Evidence) -> DepthProfile:
    axis = chain.axis
    return depth_profile(np.full(len(axis), np.nan), axis.depth, length=axis.length)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _distinct(titles: Sequence[str]) -> tuple[str, ...]:
    """Titles, with a number where two runs are called the same."""
    plain = list(titles)
    return tuple(t if plain.count(t) == 1 else f"{t} ({plain[: i + 1].count(t)})" for i, t in enumerate(plain))
