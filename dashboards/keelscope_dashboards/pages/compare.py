"""Compare: 2 to 8 runs on one depth axis, their verdicts side by side, and what differs in their configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keelscope.analysis.compare import MAX_PROFILES
from keelscope.diagnosis.report import Comparison, compare
from keelscope.formatting import decades
from keelscope_dashboards.asking import Ask, Choice, Option, Page
from keelscope_dashboards.blocks import Axis, Chart, Line, Notice, Table
from keelscope_dashboards.pages.diagnostics import verdict_block
from keelscope_dashboards.wording import typeset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope.analysis.compare import CommonDepth
    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE"]

BINS = 128
SPAN = 4.0


def _choices(_: Ask) -> Sequence[Choice]:
    return (
        Choice(
            "of",
            "Gradient",
            (Option("both", "Both"), Option("whole", "Whole tensor"), Option("late", "Late tokens")),
            ("both",),
        ),
    )


def _build(ask: Ask) -> Sequence[Block]:
    ready = [shown for shown in ask.runs if shown.report is not None][:MAX_PROFILES]
    if len(ready) < 2:
        waiting = any(shown.verdict.headline == "pending" for shown in ask.runs)
        sentence = "The runs are being read." if waiting else "Show at least two runs: the eyes in the run list."
        return [Notice("Nothing to compare yet", sentence), verdict_block(ask.runs)]
    together = compare([shown.report for shown in ready if shown.report is not None], bins=BINS)
    return [verdict_block(ready), *_charts(ask, ready, together), _totals(ready), _differences(ready)]


def _charts(ask: Ask, runs: Sequence[Shown], together: Comparison) -> list[Chart]:
    of, charts = ask.one("of"), []
    if of != "late":
        title = "Output-gradient RMS over depth"
        charts.append(_chart(title, runs, together.gradient))
    if of != "whole" and together.late_tokens is not None:
        charts.append(_chart("Late-token gradient level over depth", runs, together.late_tokens))
    return charts


def _chart(title: str, runs: Sequence[Shown], common: CommonDepth) -> Chart:
    middle = (common.edges[:-1] + common.edges[1:]) / 2
    relative = common.axis == "relative depth"
    place = middle if relative else middle + 0.5
    length = max(shown.report.axis.length for shown in runs if shown.report is not None)
    unit = next(shown.report.axis.unit for shown in runs if shown.report is not None)
    axis = (
        Axis("share of the depth (0 = input)", "relative", length=length)
        if relative
        else Axis(f"{unit} (1 = input)", "depth")
    )
    lines = tuple(
        Line(shown.name, shown.slot, place, levels, run=shown.id)
        for shown, levels in zip(runs, common.levels, strict=True)
    )
    note = "Median over the recent recorded steps that the verdict rests on."
    return Chart(title, axis, Axis(log=True, span=SPAN), lines, note=note, size="medium")


def _totals(runs: Sequence[Shown]) -> Table:
    """S of every profile of every run."""
    reports = [shown.report for shown in runs if shown.report is not None]
    titles = {key: profile.title for report in reports for key, profile in report.profiles.items()}
    rows = [("Headline", *(report.headline for report in reports))]
    rows += [("Decided by", *(_decided(report.verdict.decided_by, titles) for report in reports))]
    for key, title in titles.items():
        cells = [report.profiles[key].shape.total if key in report.profiles else np.nan for report in reports]
        said = (typeset(decades(None if np.isnan(cell) else float(cell))) for cell in cells)
        rows.append((f"Decades lost, {title}", *said))
    rows.append(
        ("Findings", *(", ".join(_rule(found.rule) for found in report.findings) or "none" for report in reports))
    )
    return Table("Verdicts side by side", ("Verdict", *(shown.name for shown in runs)), tuple(rows))


def _rule(name: str) -> str:
    return name.replace("_", " ")


def _decided(key: str, titles: dict[str, str]) -> str:
    return titles.get(key, "the findings") if key else "none"


def _differences(runs: Sequence[Shown]) -> Block:
    """The keys of the configuration on which the runs differ."""
    configs = []
    for shown in runs:
        with shown.source.reading() as run:
            facts = {"model": run.info.model_class, "parameters": f"{run.info.n_parameters:,}", "seed": run.info.seed}
            configs.append({**facts, **run.info.config})
    keys = dict.fromkeys(key for config in configs for key in config)
    rows = [(key, *(str(config.get(key, "")) for config in configs)) for key in keys]
    differing = tuple(row for row in rows if len(set(row[1:])) > 1)
    note = f"{len(rows) - len(differing)} of {len(rows)} entries are alike" if rows else ""
    return Table("What differs", ("Configuration", *(shown.name for shown in runs)), differing, note=note)


PAGE = Page(
    "compare",
    "Compare",
    "compare",
    "Which of these runs carries the gradient to the input?",
    _build,
    _choices,
    frozenset({"verdict"}),
    scrub=False,
    single=False,
)
