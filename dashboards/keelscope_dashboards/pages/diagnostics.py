"""Diagnostics: the verdict on every run, every finding with its evidence and remedy, and what was not observed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from keelscope.diagnosis.finding import name_sites
from keelscope.formatting import count, decades, number
from keelscope_dashboards.asking import Ask, Choice, Option, Page, nothing_chosen
from keelscope_dashboards.blocks import Facts, Finding, Findings, Place, Table, Verdict, Verdicts
from keelscope_dashboards.verdicts import word_of
from keelscope_dashboards.wording import typeset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from keelscope.diagnosis.finding import Finding as Found
    from keelscope.store.schema import CoverageEntry
    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE", "verdict_block"]

MAX_EXAMPLES = 2
SEVERITIES = ("error", "warning", "info")


def _choices(_: Ask) -> Sequence[Choice]:
    of = (Option("all", "All shown"), Option("focus", "Focused"))
    least = (Option("info", "All"), Option("warning", "Warnings and problems"), Option("error", "Problems"))
    return Choice("of", "Runs", of, ("all",)), Choice("least", "Severity", least, ("info",))


def _build(ask: Ask) -> Sequence[Block]:
    runs = ask.runs if ask.one("of") == "all" else (ask.focus,)
    blocks: list[Block] = [verdict_block(runs), _findings(ask, runs)]
    judged = [shown for shown in runs if shown.report is not None]
    size: Literal["medium", "third"] = "medium" if len(judged) in {1, 2, 4} else "third"
    notes = [Facts(f"How {shown.name} was judged", _notes(shown), size) for shown in judged]
    return [*blocks, _coverage(runs), *notes]


def verdict_block(runs: Sequence[Shown]) -> Verdicts:
    """The verdicts on some runs side by side.

    Args:
        runs: in the order of the run list.

    Returns:
        The block.
    """
    return Verdicts(
        tuple(
            Verdict(
                shown.id,
                shown.name,
                shown.slot,
                word_of(shown.verdict),
                shown.verdict.sentence,
                tuple((figure.label, figure.value) for figure in shown.verdict.figures),
            )
            for shown in runs
        )
    )


def _findings(ask: Ask, runs: Sequence[Shown]) -> Block:
    allowed = SEVERITIES[: SEVERITIES.index(ask.one("least")) + 1]
    pairs = [(shown, found) for shown in runs if shown.report is not None for found in shown.report.findings]
    kept = [(shown, found) for shown, found in pairs if found.severity.label in allowed]
    kept.sort(key=lambda pair: -int(pair[1].severity))
    items = tuple(_finding(shown, found) for shown, found in kept)
    waiting = [shown.name for shown in runs if shown.report is None and shown.verdict.headline == "pending"]
    note = f"{', '.join(waiting)}: being read" if waiting else ("" if items else "No rule has anything to say.")
    return Findings(count(len(items), "finding") if items else "Findings", items, note)


def _finding(shown: Shown, found: Found) -> Finding:
    place = Place(
        shown.id, found.sites[0] if found.sites else "", found.steps[1] if found.steps else -1, page="overview"
    )
    return Finding(
        found.rule.replace("_", " ").capitalize(),
        found.severity.label,
        shown.name,
        shown.slot,
        typeset(found.statement),
        typeset(found.remedy),
        _evidence(found),
        place,
    )


def _evidence(found: Found) -> tuple[tuple[str, str], ...]:
    """The numbers behind a finding."""
    pairs = [("Rule", found.rule)]
    if np.isfinite(found.value):
        pairs.append(("Measured", typeset(number(found.value))))
    if np.isfinite(found.threshold):
        pairs.append(("Limit", typeset(number(found.threshold))))
    if found.steps is not None:
        first, last = found.steps
        pairs.append(("Steps", f"{first:,}" if first == last else f"{first:,} to {last:,}"))
    if found.sites:
        pairs.append((count(len(found.sites), "site"), name_sites(found.sites)))
    return tuple(pairs)


def _notes(shown: Shown) -> tuple[tuple[str, str], ...]:
    report = shown.report
    if report is None:
        return ()
    profiles = [
        (
            f"S of the {profile.title}",
            f"{typeset(decades(profile.shape.total))} decades{'' if profile.counted else ', not counted'}",
        )
        for profile in report.profiles.values()
    ]
    return (*profiles, *(("", typeset(note)) for note in report.notes))


def _coverage(runs: Sequence[Shown]) -> Block:
    """What was observed and what was not, one row per reason, one column per run."""
    entries: dict[str, Sequence[CoverageEntry]] = {}
    for shown in runs:
        with shown.source.reading() as run:
            entries[shown.id] = run.coverage
    if not any(entries.values()):
        return nothing_chosen("These files have no coverage table: they do not say what was not observed.")
    counts = {run: Counter((e.what, e.status, e.reason) for e in listed) for run, listed in entries.items()}
    kinds = dict.fromkeys(kind for counted in counts.values() for kind in counted)
    rows = tuple(
        (
            what,
            status.replace("_", " "),
            reason or "Observed.",
            *(f"{counts[shown.id][(what, status, reason)]:,}" for shown in runs),
            _examples(entries, (what, status, reason)),
        )
        for what, status, reason in sorted(kinds, key=lambda kind: (kind[1] != "observed", kind))
    )
    head = ("What", "Status", "Reason", *(shown.name for shown in runs), "For example")
    return Table("Coverage", head, rows, numeric=tuple(range(3, 3 + len(runs))))


def _examples(entries: Mapping[str, Sequence[CoverageEntry]], kind: tuple[str, str, str]) -> str:
    """Paths of the first run that has entries of a kind."""
    for listed in entries.values():
        alike = [e.path or "(model)" for e in listed if (e.what, e.status, e.reason) == kind]
        if alike:
            return ", ".join(alike[:MAX_EXAMPLES])
    return ""


PAGE = Page(
    "diagnostics",
    "Diagnostics",
    "alert",
    "What is wrong, how is it known, and what usually helps?",
    _build,
    _choices,
    frozenset({"verdict"}),
    scrub=False,
    single=False,
)
