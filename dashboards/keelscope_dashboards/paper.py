"""The style sheet of an HTML report: light, dark and print, in the colours of the dashboard."""

from __future__ import annotations

from keelscope_dashboards.theme import DARK, LIGHT, MARKS, SHADES, style_of

__all__ = ["style_sheet"]

_LIGHT_WORDS = "--good: #0f6f3c; --fair: #8a5200; --bad: #b3261e; --band: rgba(90, 100, 114, .07);"
_DARK_WORDS = "--good: #6fd39a; --fair: #f0a93b; --bad: #ff8a80; --band: rgba(154, 163, 175, .08);"
_DASHES = ("none", "7 3", "2 3", "9 3 2 3")

_RULES = """
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: var(--ink); background: var(--page);
       font: 14px/1.5 Inter, system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 52rem; }
.soft, small, figcaption, dt { color: var(--soft); }
.lead { font-size: 1.05rem; }
.word { border: 1px solid currentColor; border-radius: 4px; padding: 0 .4em; font-weight: 600; white-space: nowrap; }
h1 .word { font-size: 1.1rem; margin-left: .4rem; }
.good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); } .none { color: var(--soft); }
dl { display: flex; flex-wrap: wrap; gap: .25rem 1.5rem; margin: 1rem 0 0; font-size: 13px; }
dl div { display: flex; gap: .4rem; } dt::after { content: ":"; } dd { margin: 0; overflow-wrap: anywhere; }
ul { padding-left: 1.2rem; }
.findings { list-style: none; padding: 0; } .findings li { margin: 0 0 .75rem; max-width: 56rem; }
.table, .wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 2px 10px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; text-align: left; white-space: normal; vertical-align: bottom; }
td.n, thead th.n { text-align: right; }
td.gap { color: var(--soft); }
summary { cursor: pointer; margin: .75rem 0; }
figure { margin: 0 0 1.25rem; } figcaption { font-size: 13px; max-width: 52rem; }
.plots { display: flow-root; } .half { float: left; width: 49%; min-width: 20rem; margin-right: 1%; }
svg { display: block; width: 100%; font-size: 12px; fill: var(--ink); }
svg.chart { max-width: 760px; min-width: 520px; } .half svg.chart { min-width: 0; max-width: 380px; }
svg.waterfall { max-width: 48rem; font-size: 13px; }
svg .lost { fill: var(--lost); } svg .gained { fill: var(--gained); }
svg .total, svg .soft { fill: var(--soft); }
svg line { stroke: var(--axis); } svg .grid { stroke: var(--grid); }
svg .zero { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .frame { fill: none; stroke: var(--axis); } svg .band { fill: none; } svg .band.even { fill: var(--band); }
svg [class^="run"] { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.tiles [class^="k"] { shape-rendering: crispEdges; }
"""
_PRINT = """
body { margin: 0; max-width: none; padding: 0; font-size: 11px; } * { print-color-adjust: exact; }
dl, figcaption { font-size: 10.5px; } h1 { font-size: 1.6rem; } .lead { font-size: 1.15em; }
table { font-size: 9.5px; } th, td { padding: 1px 6px; } .table, .wide { overflow: visible; }
details { display: none; } tr, figure, .findings li { break-inside: avoid; } h2, h3 { break-after: avoid; }
svg.chart { min-width: 0; }
"""


def style_sheet() -> str:
    """The whole sheet.

    Returns:
        CSS without any reference to another file.
    """
    light, dark = f"{style_of(LIGHT)} {_LIGHT_WORDS}", f"{style_of(DARK)} {_DARK_WORDS}"
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f"@media print {{ :root {{ color-scheme: light; {light} }} }}\n"
        f"{_RULES}{_runs()}{_shades()}@media print {{ {_PRINT} }}\n"
    )


def _runs() -> str:
    """Lines, told apart by dash as well as by colour, and their single points."""
    return "".join(
        f"svg .run{i} {{ stroke: var(--run{i}); stroke-dasharray: {dash}; }} svg .dot{i} {{ fill: var(--run{i}); }}\n"
        for i, dash in enumerate(_DASHES)
    )


def _shades() -> str:
    """Cells of heatmaps."""
    levels = "".join(f".k{i} {{ fill: var(--k{i}); }} " for i in range(SHADES))
    marks = "".join(f".k{SHADES + i} {{ fill: {colour}; }} " for i, (_, colour) in enumerate(MARKS))
    return f"{levels}{marks}\n"
