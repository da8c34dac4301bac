"""One report in the terminal: the headline, the gradient over depth as a small chart, findings, and the layer table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keelscope.formatting import count, decades, number
from keelscope.tables import COLUMNS, Column, Gap, fold, path_of
from keelscope.terminal.palette import BAR, SEVERITY_STYLE, WORD_STYLE, Encodable, frame
from keelscope.terminal.sparkline import Scale, bar, columns, sparkline

if TYPE_CHECKING:
    from keelscope.diagnosis.finding import Severity
    from keelscope.diagnosis.layers import Layer
    from keelscope.diagnosis.profiles import NamedProfile
    from keelscope.diagnosis.record import Diagnosis

__all__ = ["report_view"]

_CHART_ROWS = 5
_CHART_LAYERS = 4
_PATH = 0.26  # of the width
_GAP = 12
_HEADINGS = {
    "depth": "depth",
    "path": "layer",
    "kind": "type",
    "output_variance": "out var",
    "gradient_rms": "grad RMS",
    "late_token_gradient": "late tok",
    "ratio": "ratio",
    "parameter_gradient_norm": "p. grad",
    "weight_norm": "weights",
    "norm_gain": "norm",
    "shortcut_gain": "shortcut",
    "branch_gain": "branch",
    "gate": "gate",
}
_MEANINGS = {
    "late_token_gradient": "gradient of a typical token of the later half",
    "ratio": "gradient over that of the next row",
    "norm_gain": "mean Jacobian gain of its norms",
    "shortcut_gain": "log10 of what shortcuts alone leave of the gradient at the top",
    "branch_gain": "mean square of the branch over that of the stream",
    "gate": "mean weight of its gates",
}
_FIELDS = {"gradients/late_token_level": "late_token_gradient", "parameter_gradients/norm": "parameter_gradient_norm"}
_PRIORITY = (
    "gradient_rms",
    "depth",
    "shortcut_gain",
    "branch_gain",
    "late_token_gradient",
    "norm_gain",
    "parameter_gradient_norm",
    "gate",
    "output_variance",
    "ratio",
    "weight_norm",
    "kind",
)
_WIDTHS = {name: 5 if name == "depth" else 12 if name == "kind" else 8 for name in _HEADINGS}


def report_view(
    report: Diagnosis, console: Console, *, unfold: bool = False, width: int | None = None
) -> RenderableType:
    """One report.

    Args:
        report: what to show.
        console: tells width and character set.
        unfold: show every layer of long stacks.
        width: characters per line; the console's by default.

    Returns:
        Something rich can print.
    """
    columns_free = width or console.width
    parts: list[RenderableType] = [_headline(report)]
    if report.profile is not None and report.profile.shape.observed >= _CHART_LAYERS:
        parts += [
            _chart(report.profile, report, columns_free),
            _other_profiles(report, columns_free),
        ]
    parts += [_finding_lines(report), _layer_table(report, columns_free, unfold=unfold)]
    notes = [*report.notes, _legend(report, columns_free)]
    parts.append(Padding(Text("\n".join(filter(None, notes)), style="dim"), (1, 0, 0, 1), expand=False))
    return Encodable(Group(*parts))


def _headline(report: Diagnosis) -> RenderableType:
    info = report.run.info
    facts = [info.model_class, f"{info.n_parameters:,} parameters" if info.n_parameters else ""]
    facts.append(count(len(report.run.steps), "recorded step"))
    style = WORD_STYLE[report.headline]
    why = f"\n{report.explanation}" if report.explanation else ""
    body = Text.assemble((report.headline, f"bold {style}"), "  ", report.sentence, why)
    subtitle = Text(", ".join(fact for fact in facts if fact), style="dim")
    return Panel(
        body, title=Text(report.title, style="bold"), subtitle=subtitle, title_align="left", subtitle_align="right",
        border_style=style, box=box.ROUNDED, padding=(0, 1),
    )  # fmt: skip


def _chart(profile: NamedProfile, report: Diagnosis, width: int) -> RenderableType:
    """A column chart over depth with tick values on a log10 axis."""
    levels = profile.shape.levels
    scale = Scale.over(levels)
    room = max(10, min(width - 14, 120))
    lines = columns(levels, room, _CHART_ROWS)
    ticks = {0: number(10.0**scale.high), _CHART_ROWS - 1: number(10.0**scale.low)}
    text = Text.assemble((f"{profile.title} over depth (log10)\n", "bold"))
    style = WORD_STYLE[report.headline]
    for row, line in enumerate(lines):
        text.append(f"{ticks.get(row, ''):>10} ┤", style="dim")
        text.append(f"{line}\n", style=style)
    drawn = len(lines[0])
    unit, length = report.axis.unit, report.axis.length
    left, right = "input", f"{count(length, unit)}, output"
    gap = "─" * max(1, drawn - len(left) - len(right) - 2)
    text.append(f"{'':>10} └{left} {gap} {right}", style="dim")
    return Padding(text, (1, 0, 0, 1), expand=False)


def _other_profiles(report: Diagnosis, width: int) -> RenderableType:
    """One sparkline per remaining profile, with S and span."""
    table = Table.grid(padding=(0, 2))
    for key, profile in report.profiles.items():
        if report.profile is not None and key == report.profile.key:
            continue
        line = sparkline(profile.shape.levels, max(8, min(width - 70, 40)))
        figures = f"S {decades(profile.shape.total)}, span {number(profile.shape.span)} decades"
        table.add_row(profile.title, Text(line, style="cyan"), figures if profile.counted else "not counted")
    return Padding(table, (1, 0, 0, 1), expand=False) if table.row_count else Text("")


def _finding_lines(report: Diagnosis) -> RenderableType:
    if not report.findings:
        return Padding(Text("No findings.", style="dim"), (1, 0, 0, 1), expand=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        text = Text(finding.statement)
        if finding.remedy:
            text.append(f"\n{finding.remedy}", style="dim")
        table.add_row(_label(finding.severity), Text(finding.rule, style="bold"), text)
    return Padding(table, (1, 0, 0, 1), expand=False)


def _label(severity: Severity) -> Text:
    return Text(severity.label, style=SEVERITY_STYLE[severity])


def _layer_table(report: Diagnosis, width: int, *, unfold: bool) -> RenderableType:
    rows = list(report.layers) if unfold else fold(report.layers, report.findings)
    if not rows:
        return Text("")
    room = _path_room(report, width)
    shown = _fitting(report, width, room)
    table = frame()
    for column in shown:
        least = max(room, _GAP) if column.name == "path" else _WIDTHS[column.name]
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        table.add_column(_HEADINGS[column.name], justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    drawn = _drawn(report)
    table.add_column(_HEADINGS[drawn], no_wrap=True, width=BAR)
    scale = Scale.over([_level(layer, drawn) for layer in report.layers])
    for row in rows:
        if isinstance(row, Gap):
            table.add_row("", Text(str(row), style="dim"))
            continue
        cells = [Text(_short(path_of(row), room)) if c.name == "path" else c.text(row) for c in shown]
        table.add_row(*cells, Text(bar(_level(row, drawn), scale, BAR), style="cyan"))
    return Padding(table, (1, 0, 0, 1), expand=False)


def _path_room(report: Diagnosis, width: int) -> int:
    return min(int(_PATH * width), max(len(path_of(row)) for row in report.layers))


def _legend(report: Diagnosis, width: int) -> str:
    """What the columns that are shown mean, where their heads do not say it."""
    if not report.layers:
        return ""
    shown = _fitting(report, width, _path_room(report, width))
    said = "; ".join(
        f"{_HEADINGS[column.name]} = {_MEANINGS[column.name]}" for column in shown if column.name in _MEANINGS
    )
    return f"S: decades lost from output to input. Columns: {said}." if said else ""


def _fitting(report: Diagnosis, width: int, room: int) -> list[Column]:
    """The columns that fit and hold something, dropped from the least telling one on."""
    free = width - 3 - BAR - max(room, _GAP) - 2
    chosen = {"path"}
    for name in _PRIORITY:
        cost = _WIDTHS[name] + 2
        if cost <= free and any(getattr(layer, name) is not None for layer in report.layers):
            chosen.add(name)
            free -= cost
    return [column for column in COLUMNS if column.name in chosen]


def _short(path: str, room: int) -> str:
    """A path that fits, its end kept: that is where layers differ."""
    return path if len(path) <= room else f"..{path[2 - room :]}"


def _drawn(report: Diagnosis) -> str:
    """The `Layer` field that the bars show: the quantity that decided the verdict."""
    return _FIELDS.get(report.verdict.decided_by, "gradient_rms")


def _level(layer: Layer, field: str) -> float:
    value = getattr(layer, field)
    return float(np.log10(value)) if value is not None and 0 < value < float("inf") else float("nan")
