"""A report as one HTML page that needs nothing else: no scripts, no network, readable in light, dark and print.

Enters through the entry point group ``keelscope.renderers``; `keelscope.diagnosis.Report.to_html` and
``keelscope report --output report.html`` call it.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from keelscope_dashboards.why import why_section

if TYPE_CHECKING:
    from keelscope.diagnosis import Report

__all__ = ["render"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --soft: #5c6670; --line: #dfe3e8; --page: #ffffff;
        --lost: #1f5ba3; --gained: #b04a1c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa4ae; --line: #363c44; --page: #16191d;
        --lost: #5fa3e6; --gained: #dd8247; } }
@media print { :root { --ink: #000; --soft: #444; --line: #bbb; --page: #fff;
        --lost: #1f5ba3; --gained: #b04a1c; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--ink); background: var(--page);
       font: 14px/1.5 Inter, system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 1rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 2px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; text-align: left; white-space: normal; vertical-align: bottom; }
small, figcaption { color: var(--soft); }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
figure { margin: 0 0 1.5rem; }
figcaption { font-size: 13px; }
td.n, thead th.n { text-align: right; }
td.gap { color: var(--soft); }
svg.waterfall { display: block; width: 100%; max-width: 48rem; font-size: 13px; fill: var(--ink); }
svg .lost { fill: var(--lost); }
svg .gained { fill: var(--gained); }
svg .total, svg .soft { fill: var(--soft); }
svg line { stroke: var(--line); }
svg .zero { stroke: var(--soft); stroke-dasharray: 2 3; }
@media print { tr, figure { break-inside: avoid; } }
"""


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
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f'<body><main><h1>Gradient flow</h1><div class="table" tabindex="0">{report._repr_html_()}</div>'
        f"{why_section(report)}</main></body></html>\n"
    )
