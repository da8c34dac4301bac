"""Several reports in the terminal, side by side: a verdict line each, then one row per stretch of depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keelscope.diagnosis.finding import Severity
from keelscope.formatting import NOT_OBSERVED, number
from keelscope.terminal.palette import BAR, SEVERITY_STYLE, WORD_STYLE, Encodable, frame
from keelscope.terminal.sparkline import Scale, bar, sparkline

if TYPE_CHECKING:
    from keelscope.diagnosis.comparison import SideBySide

__all__ = ["comparison_view"]

_NUMBER = 8
_SHORTEST_BAR = 3
_SHORTEST_LINE = 8


def comparison_view(comparison: SideBySide, console: Console, *, width: int | None = None) -> RenderableType:
    """Several runs side by side: a verdict line each, then one row per stretch of depth.

    Args:
        comparison: what to show.
        console: tells width and character set.
        width: characters per line; the console's by default.

    Returns:
        Something rich can print.
    """
    free = width or console.width
    verdicts = _verdicts(comparison, free)
    table = _depth_table(comparison, free)
    found = _findings(comparison)
    legend = Padding(Text(_legend(comparison), style="dim"), (1, 0, 0, 1), expand=False)
    return Encodable(Group(verdicts, *([found] if found is not None else []), table, legend))


def _verdicts(comparison: SideBySide, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    decided = ["" if report.profile is None else report.profile.title for report in comparison.reports]
    taken = max(map(len, comparison.titles)) + max(len(report.headline) for report in comparison.reports)
    room = width - taken - max(map(len, decided)) - 20
    for title, report, named in zip(comparison.titles, comparison.reports, decided, strict=True):
        style = WORD_STYLE[report.headline]
        levels = report.profile.shape.levels if report.profile is not None else np.array([])
        line = sparkline(levels, min(32, room)) if room >= _SHORTEST_LINE else ""
        word = Text(report.headline, style=f"bold {style}")
        table.add_row(Text(title, style="bold"), word, Text(line, style=style), f"S {report.total}", Text(named, "dim"))
    return Padding(table, (1, 0, 0, 1), expand=False)


def _findings(comparison: SideBySide) -> RenderableType | None:
    """Errors and warnings of each run by name: a level gradient alone is no clean bill."""
    table = Table.grid(padding=(0, 2))
    for title, report in zip(comparison.titles, comparison.reports, strict=True):
        grave = [finding for finding in report.findings if finding.severity >= Severity.WARNING]
        if grave:
            names = ", ".join(dict.fromkeys(finding.rule for finding in grave))
            worst = max(grave, key=lambda finding: finding.severity).severity
            table.add_row(Text(title, style="bold"), Text(f"{worst.label}: {names}", style=SEVERITY_STYLE[worst]))
    return Padding(table, (1, 0, 0, 1), expand=False) if table.row_count else None


def _depth_table(comparison: SideBySide, width: int) -> RenderableType:
    labels = comparison.labels()
    unit = comparison.reports[0].axis.unit if comparison.gradient.axis == "depth" else "depth"
    label_width = max(len(text) for text in (*labels, unit))
    cell = (width - 1 - label_width) // len(comparison.titles) - 2
    both = comparison.late_tokens is not None and cell >= 2 * _NUMBER + 1
    numbers = 2 * _NUMBER + 1 if both else _NUMBER
    bars = min(BAR, cell - numbers - 1) if cell - numbers - 1 >= _SHORTEST_BAR else 0
    table = frame()
    table.add_column(unit, justify="right", no_wrap=True)
    heading = f"{'grad RMS':>{_NUMBER}} {'late tok':>{_NUMBER}}" if both else f"{'grad RMS':>{_NUMBER}}"
    for title in comparison.titles:
        table.add_column(f"{title}\n{heading}", no_wrap=True, overflow="ellipsis", min_width=min(cell, numbers))
    scale = Scale.over([shown for b in range(len(labels)) for shown in _shown(comparison, b)])
    styles = [WORD_STYLE[report.headline] for report in comparison.reports]
    for b, label in enumerate(labels):
        cells = []
        for r, drawn in enumerate(_shown(comparison, b)):
            text = Text(_values(comparison, r, b, both=both))
            text.append(f" {bar(drawn, scale, bars)}" if bars else "", style=styles[r])
            cells.append(text)
        table.add_row(label, *cells)
    return Padding(table, (1, 0, 0, 1), expand=False)


def _shown(comparison: SideBySide, b: int) -> list[float]:
    """Per run the level that its bar shows: late tokens where they are known, else the whole tensor."""
    whole, late = comparison.gradient.levels[:, b], comparison.late_tokens
    shown = whole if late is None else np.where(np.isnan(late.levels[:, b]), whole, late.levels[:, b])
    return [float(level) for level in shown]


def _values(comparison: SideBySide, r: int, b: int, *, both: bool) -> str:
    text = f"{_linear(comparison.gradient.levels[r, b]):>{_NUMBER}}"
    late = comparison.late_tokens
    return f"{text} {_linear(late.levels[r, b]):>{_NUMBER}}" if both and late is not None else text


def _linear(level: float) -> str:
    return NOT_OBSERVED if np.isnan(level) else number(10.0**level)


def _legend(comparison: SideBySide) -> str:
    bars = "" if comparison.late_tokens is None else "; bars show the late-token level where there is one"
    return (
        f"Output-gradient RMS, input side first{bars}. S: decades lost from output to input, positive when the "
        "gradient shrinks."
    )
