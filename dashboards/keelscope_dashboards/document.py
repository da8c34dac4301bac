"""A report as one HTML page that needs nothing else: no scripts, no network, readable in light, dark and print.

Enters through the entry point group ``keelscope.renderers``; `keelscope.diagnosis.Report.to_html` and
``keelscope report --output report.html`` call it. The colours are those of the dashboard.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from keelscope import tables
from keelscope.formatting import count
from keelscope_dashboards.paper import style_sheet
from keelscope_dashboards.plots import plots_section
from keelscope_dashboards.why import why_section

if TYPE_CHECKING:
    from keelscope.diagnosis import Report

__all__ = ["render"]

_FACTS = 16
_LONGEST = 120  # characters of one fact


def render(report: Report) -> str:
    """The report as a complete page.

    Args:
        report: any report.

    Returns:
        HTML text; every string from the run is escaped.
    """
    title = escape(f"keelscope: {report.title}: {report.headline}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style_sheet()}</style></head>\n'
        f"<body><main>{_head(report)}{_findings(report)}{plots_section(report)}{why_section(report)}"
        f"{_layers(report)}</main></body></html>\n"
    )


def _head(report: Report) -> str:
    tone = _KINDS.get(report.headline, "bad")
    if tone == "good" and any(finding.severity.label == "error" for finding in report.findings):
        tone = "fair"
    word = f'<span class="word {tone}">{report.headline}</span>'
    why = f"<p>{escape(report.explanation)}</p>" if report.explanation else ""
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(report))
    return (
        f'<header><p class="soft">keelscope: gradient flow</p><h1>{escape(report.title)} {word}</h1>'
        f'<p class="lead">{escape(report.sentence)}</p>{why}<dl>{facts}</dl></header>'
    )


_KINDS = {"flat": "good", "drifting": "fair", "not enough data": "none"}


def _facts(report: Report) -> list[tuple[str, str]]:
    """What was measured: the model, the steps, and what the run's configuration says."""
    info = report.run.info
    known = [
        ("model", info.model_class),
        ("parameters", f"{info.n_parameters:,}" if info.n_parameters else ""),
        ("recorded", count(len(report.run.steps), "step")),
        ("with", info.training_library),
    ]
    plain = [(name, str(value)) for name, value in info.config.items() if isinstance(value, str | int | float)]
    return [(name, value[:_LONGEST]) for name, value in known + plain[:_FACTS] if value]


def _findings(report: Report) -> str:
    if not report.findings:
        return "<section><h2>Findings</h2><p>None.</p></section>"
    items = "".join(
        f'<li><span class="word {_SEVERITIES[finding.severity.label]}">{finding.severity.label}</span> '
        f"<b>{escape(finding.rule)}</b> {escape(finding.statement)}"
        + (f'<br><span class="soft">{escape(finding.remedy)}</span>' if finding.remedy else "")
        + "</li>"
        for finding in report.findings
    )
    return f'<section><h2>Findings</h2><ul class="findings">{items}</ul></section>'


_SEVERITIES = {"error": "bad", "warning": "fair", "info": "none"}


def _layers(report: Report) -> str:
    """The layer table, long stacks folded, with the whole table behind a summary; then the notes."""
    folded = tables.html_table(report)
    whole = tables.html_table(report, unfold=True)
    more = (
        "" if whole == folded else f"<details><summary>All {len(report.layers)} rows</summary>{_wide(whole)}</details>"
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f'<section><h2>Layers</h2>{_wide(folded)}{more}<ul class="soft">{notes}</ul></section>'


def _wide(table: str) -> str:
    return f'<div class="table" tabindex="0">{table}</div>'
