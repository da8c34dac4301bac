"""The layer table of a diagnosis as rows of text, folded for long stacks, and as Markdown, CSV and HTML.

`keelscope.diagnosis.report` offers these as methods; `keelscope.terminal` draws the same rows with rich.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from keelscope.formatting import decades, number

if TYPE_CHECKING:
    from keelscope.diagnosis.finding import Finding
    from keelscope.diagnosis.layers import Layer
    from keelscope.diagnosis.record import Diagnosis

__all__ = [
    "COLUMNS",
    "FOLD_ABOVE",
    "Column",
    "Gap",
    "as_csv",
    "as_html",
    "as_markdown",
    "columns_of",
    "fold",
    "html_table",
    "path_of",
]

FOLD_ABOVE = 40
"""Rows of one stack above which it is folded."""

_ENDS = 3  # rows kept at either end of a folded stack
_INNER = (0.25, 0.5, 0.75)
_ROUNDING = 1e-6  # decades
_NAMED = 4  # sites of one finding that stay visible


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows that a folded table leaves out."""

    hidden: int

    def __str__(self) -> str:
        return f"... {self.hidden} more"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the layer table."""

    name: str
    """Field of `Layer`, and the CSV header."""
    title: str
    text: Callable[[Layer], str]
    numeric: bool = True
    optional: bool = False
    """Left out of a report in which no layer has it."""


def path_of(layer: Layer) -> str:
    """The path as shown; the model itself has none."""
    return layer.path or "(model)"


def _depth(layer: Layer) -> str:
    return "" if layer.depth is None else f"{layer.depth:g}"


def _shared(layer: Layer, value: float | None) -> str:
    return "tied" if value is None and layer.tied_to else number(value)


def _change(value: float | None) -> str:
    """Decades with three digits after the point; what is only rounding is 0."""
    if value is None or not _ROUNDING < abs(value) < math.inf:
        return decades(value if value is None or abs(value) > _ROUNDING else 0.0)
    return f"{value:+.3f}"


COLUMNS = (
    Column("depth", "depth", _depth),
    Column("path", "layer", path_of, numeric=False),
    Column("kind", "type", lambda layer: layer.kind, numeric=False),
    Column("output_variance", "output variance", lambda layer: number(layer.output_variance), optional=True),
    Column("gradient_rms", "gradient RMS", lambda layer: number(layer.gradient_rms)),
    Column(
        "late_token_gradient", "late-token gradient", lambda layer: number(layer.late_token_gradient), optional=True
    ),
    Column("ratio", "ratio to next", lambda layer: number(layer.ratio), optional=True),
    Column("norm_gain", "norm gain", lambda layer: number(layer.norm_gain), optional=True),
    Column("shortcut_gain", "shortcut gain (decades)", lambda layer: _change(layer.shortcut_gain), optional=True),
    Column("branch_gain", "branch gain v", lambda layer: number(layer.branch_gain), optional=True),
    Column("gate", "gate", lambda layer: number(layer.gate), optional=True),
    Column(
        "parameter_gradient_norm",
        "param grad norm",
        lambda layer: _shared(layer, layer.parameter_gradient_norm),
        optional=True,
    ),
    Column("weight_norm", "weight norm", lambda layer: _shared(layer, layer.weight_norm), optional=True),
)
"""The columns in order."""


def columns_of(layers: Sequence[Layer]) -> list[Column]:
    """The columns that a table of these layers shows.

    Args:
        layers: all rows.

    Returns:
        Every column, but the optional ones only where some layer has a value.
    """
    return [c for c in COLUMNS if not c.optional or any(getattr(layer, c.name) is not None for layer in layers)]


def fold(layers: Sequence[Layer], findings: Iterable[Finding] = (), *, above: int = FOLD_ABOVE) -> list[Layer | Gap]:
    """The rows worth reading: long stacks keep both ends, the quartiles, and rows that a finding names.

    Args:
        layers: all rows.
        findings: the first few sites of each stay visible.
        above: stacks with more rows than this are folded.

    Returns:
        Rows and gaps, in order.
    """
    named = {path for finding in findings for path in finding.sites[:_NAMED]}
    members: dict[str, list[int]] = {}
    for i, layer in enumerate(layers):
        if layer.role == "layer":
            members.setdefault(layer.stack, []).append(i)
    hidden: set[int] = set()
    for indices in members.values():
        if len(indices) > above:
            kept = {*indices[:_ENDS], *indices[-_ENDS:], *(indices[int(q * (len(indices) - 1))] for q in _INNER)}
            hidden.update(i for i in indices if i not in kept and layers[i].path not in named)
    return _with_gaps(layers, hidden)


def _with_gaps(layers: Sequence[Layer], hidden: set[int]) -> list[Layer | Gap]:
    rows: list[Layer | Gap] = []
    run = 0
    for i, layer in enumerate(layers):
        if i in hidden:
            run += 1
            continue
        if run:
            rows.append(Gap(run))
            run = 0
        rows.append(layer)
    return rows


def as_markdown(report: Diagnosis, *, unfold: bool = False) -> str:
    """The report as a Markdown document.

    Args:
        report: what to write.
        unfold: show every layer of long stacks.

    Returns:
        Text that ends with a newline.
    """
    lines = [f"## {_cell(report.title)}: {report.headline}", "", report.sentence, ""]
    lines += [report.explanation, ""] if report.explanation else []
    if report.findings:
        lines += ["| severity | rule | finding | remedy |", "|---|---|---|---|"]
        lines += [
            f"| {f.severity.label} | {f.rule} | {_cell(f.statement)} | {_cell(f.remedy)} |" for f in report.findings
        ]
        lines.append("")
    columns = columns_of(report.layers)
    lines.append(f"| {' | '.join(column.title for column in columns)} |")
    lines.append(f"|{'|'.join('---:' if column.numeric else '---' for column in columns)}|")
    for row in report.layers if unfold else fold(report.layers, report.findings):
        cells = ["", str(row)] if isinstance(row, Gap) else [_cell(column.text(row)) for column in columns]
        lines.append(f"| {' | '.join(cells + [''] * (len(columns) - len(cells)))} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in report.notes), ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def as_csv(report: Diagnosis) -> str:
    """The layer table, every layer, with full precision: empty for not observed, ``NaN`` and ``Inf`` as they are.

    Args:
        report: what to write.

    Returns:
        A header line of `Layer` field names, then one line per layer.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [*(column.name for column in COLUMNS), "role", "stack", "tied_to"]
    writer.writerow(names)
    for layer in report.layers:
        writer.writerow([_plain(getattr(layer, name)) for name in names])
    return out.getvalue()


def _plain(value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return repr(value) if math.isfinite(value) else number(value)


def as_html(report: Diagnosis) -> str:
    """The report as one HTML fragment without scripts or outside resources, as notebooks show it.

    Args:
        report: what to write.

    Returns:
        A ``<div>``.
    """
    parts = [f"<p><b>{escape(report.title)}: {report.headline}</b><br>{escape(report.sentence)}</p>"]
    parts += [f"<p>{escape(report.explanation)}</p>"] if report.explanation else []
    if report.findings:
        items = (f"<li><b>{f.severity.label} {f.rule}</b>: {escape(f.statement)}</li>" for f in report.findings)
        parts.append(f"<ul>{''.join(items)}</ul>")
    parts.append(html_table(report))
    parts.append(f"<p><small>{escape(' '.join(report.notes))}</small></p>")
    return f"<div>{''.join(parts)}</div>"


def html_table(report: Diagnosis, *, unfold: bool = False) -> str:
    """The layer table as HTML.

    Args:
        report: what to write.
        unfold: show every layer of long stacks.

    Returns:
        A ``<table>``.
    """
    columns = columns_of(report.layers)
    head = "".join(f'<th scope="col"{_ALIGNED[column.numeric]}>{column.title}</th>' for column in columns)
    rows = report.layers if unfold else fold(report.layers, report.findings)
    body = "".join(_html_row(row, columns) for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_ALIGNED = {True: ' style="text-align:right"', False: ' style="text-align:left"'}


def _html_row(row: Layer | Gap, columns: Sequence[Column]) -> str:
    if isinstance(row, Gap):
        return f'<tr><td></td><td colspan="{len(columns) - 1}" style="text-align:left"><i>{row}</i></td></tr>'
    cells = (f"<td{_ALIGNED[column.numeric]}>{escape(column.text(row))}</td>" for column in columns)
    return f"<tr>{''.join(cells)}</tr>"
