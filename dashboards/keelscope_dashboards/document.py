"""A report as one HTML page that needs nothing else: no scripts, no network, readable in light, dark and print.

Enters through the entry point group ``keelscope.renderers``; `keelscope.diagnosis.Report.to_html` and
``keelscope report --output report.html`` call it.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keelscope.diagnosis import Report

__all__ = ["render"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --soft: #5c6670; --line: #dfe3e8; --page: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa4ae; --line: #363c44; --page: #16191d; } }
@media print { :root { --ink: #000; --soft: #444; --line: #bbb; --page: #fff; } }
body { margin: 2rem auto; max-width: 68rem; padding: 0 1rem; color: var(--ink); background: var(--page);
       font: 14px/1.5 Inter, system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 1rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 2px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; text-align: left; }
small { color: var(--soft); }
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
        f'<body><h1>Gradient flow</h1><main class="table">{report._repr_html_()}</main></body></html>\n'
    )
