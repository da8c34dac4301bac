"""The frame of all pages and the Overview as Dash components: header, navigation, run list, cards, linked charts.

The charts are empty boxes with an id. `assets/view.js` puts Plotly axes into them, built from `settings`, and draws the
dense marks on a canvas over them; the words come from `cards`. What the other pages hold is drawn by
`assets/pages.js` from their blocks.
"""

from __future__ import annotations

import base64
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dash import dcc, html

from keelscope_dashboards import cards
from keelscope_dashboards.figures import axes_layout
from keelscope_dashboards.pages import PAGES
from keelscope_dashboards.panels import PANELS
from keelscope_dashboards.state import digest_of
from keelscope_dashboards.theme import DARK, LIGHT, LIMIT, SYMBOLS, TICKS, colour_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope_dashboards.asking import Page
    from keelscope_dashboards.state import RunState

__all__ = ["settings", "whole_page"]

SNIPPET = """import keelscope as ks
with ks.watch(model, "runs/mine.h5", optimizer=optimizer):
    train()"""
MARGINS = {
    "heatmap": {"l": 56, "r": 14, "t": 8, "b": 26},
    "profile": {"l": 48, "r": 14, "t": 8, "b": 26},
    "history": {"l": 56, "r": 14, "t": 8, "b": 40},
    "page": {"l": 64, "r": 14, "t": 8, "b": 40},
}
KEYS = (
    ("← → ↑ ↓", "move the cursor; with Shift ten at a time"),
    ("Home End", "first and last step"),
    ("f", "follow the newest step"),
    ("Space", "play the steps, and stop"),
    ("[ ]", "previous and next run"),
    ("/", "filter the runs, where there are many"),
    ("p P", "next and previous page"),
    ("1 … 4", "metric of the overview"),
    ("Ctrl + wheel", "zoom about the pointer"),
    ("r", "reset the zoom"),
    ("?", "this list"),
)


def settings() -> dict[str, Any]:
    """What the browser needs to draw: panels, colours, symbols and the axes of the three charts."""
    axes = {"heatmap": ("", "layer (1 = input)"), "profile": ("", ""), "history": ("step", "")}
    frames = {
        palette.name: {
            name: axes_layout(palette, x=x, y=y) | {"margin": MARGINS[name]} for name, (x, y) in axes.items()
        }
        for palette in (LIGHT, DARK)
    }
    for frame in frames.values():
        frame["heatmap"]["xaxis"]["showgrid"] = frame["heatmap"]["yaxis"]["showgrid"] = False
    return {
        "panels": [asdict(panel) for panel in PANELS],
        "pages": [_page_settings(page) for page in PAGES],
        "symbols": SYMBOLS,
        "limit": LIMIT,
        "cards": cards.MAX_CARDS,
        "ticks": TICKS,
        "palettes": {palette.name: asdict(palette) for palette in (LIGHT, DARK)},
        "colours": {p.name: base64.b64encode(colour_table(p).tobytes()).decode() for p in (LIGHT, DARK)},
        "ramps": {p.name: base64.b64encode(colour_table(p, ramp=True).tobytes()).decode() for p in (LIGHT, DARK)},
        "plain": {p.name: axes_layout(p, x="", y="") | {"margin": MARGINS["page"]} for p in (LIGHT, DARK)},
        "frames": frames,
    }


def _page_settings(page: Page) -> dict[str, Any]:
    return {
        "name": page.name,
        "title": page.title,
        "question": page.question,
        "follows": sorted(page.follows),
        "scrub": page.scrub,
        "single": page.single,
    }


def whole_page(states: Sequence[RunState], *, title: str) -> html.Div:
    """Everything that is on the screen.

    Args:
        states: all runs.
        title: what is on show.

    Returns:
        The layout.
    """
    return html.Div(
        [
            dcc.Store(id="settings", data=settings()),
            dcc.Store(id="digest", data=digest_of(tuple(states))),
            dcc.Store(id="drawn", data=digest_of(tuple(states))),
            dcc.Store(id="dealt"),
            html.A("Skip to the charts", href="#main", className="skip"),
            _header(title),
            _side(states),
            _main(states, title),
            _keys(),
        ]
    )


def _header(title: str) -> html.Header:
    return html.Header(
        [
            html.Button(
                cards.icon("menu"),
                id="menu",
                className="square phone-only",
                type="button",
                **{"aria-label": "Pages and runs", "aria-expanded": "false", "aria-controls": "side"},
            ),
            html.Span(className="logo", **{"aria-hidden": "true"}),
            html.Span("keelscope", className="brand"),
            html.Span(title, className="place mono"),
            html.Span(id="pulse", className="pulse", role="status"),
            html.Button([cards.icon("link"), html.Span("Copy link")], id="copy", className="plain", type="button"),
            html.Button(
                [cards.icon("save"), html.Span("Save page")],
                id="save",
                className="plain",
                type="button",
                title="Save this page as one HTML file",
            ),
            html.Button(
                cards.icon("keyboard"),
                id="help",
                className="square",
                type="button",
                **{"aria-label": "Keyboard shortcuts"},
            ),
            html.Button(
                cards.icon("theme"),
                id="theme",
                className="square",
                type="button",
                title="Light or dark",
                **{"aria-label": "Light or dark"},
            ),
        ],
        className="top",
    )


def _side(states: Sequence[RunState]) -> html.Nav:
    return html.Nav(
        [
            html.Ul([_link(page) for page in PAGES], className="pages"),
            html.H2("Runs"),
            html.Div(id="picker", className="picker", hidden=True),  # filled by picker.js
            html.Div(cards.run_list(states), id="run-list"),
            html.P("Served from this machine only", id="origin", className="origin"),
        ],
        id="side",
        className="side",
        **{"aria-label": "Pages and runs"},
    )


def _link(page: Page) -> html.Li:
    link = html.A(
        [cards.icon(f"page-{page.icon}"), html.Span(page.title)],
        href=f"./{'' if page.name == PAGES[0].name else page.name}",
        className="page-link",
        id=f"page-{page.name}",
        title=page.question,
        **{"data-page": page.name},
    )
    return html.Li(link)


def _main(states: Sequence[RunState], title: str) -> html.Main:
    return html.Main(
        [
            html.P(id="banner", className="banner", role="alert", hidden=True),
            _empty(title),
            _overview(states),
            html.Div(id="page", className="page"),  # filled by pages.js
            html.Div(id="announce", className="unseen", **{"aria-live": "polite"}),
        ],
        id="main",
        tabIndex="-1",
    )


def _overview(states: Sequence[RunState]) -> html.Div:
    linked = [_heatmap(), _profile(), _slider(), _readout(), _history(), _findings(states)]
    return html.Div(
        [
            html.H1("Overview", className="unseen"),
            html.Section(cards.verdict_cards(states), id="cards", className="cards", **{"aria-label": "Verdicts"}),
            _toolbar(),
            html.Div(linked, className="linked"),
        ],
        id="overview",
    )


def _empty(title: str) -> html.Section:
    return html.Section(
        [
            html.H2("No runs yet"),
            html.P(["Nothing is recorded in ", html.Code(title), ". Three lines record a training run:"]),
            html.Pre(SNIPPET, className="mono", tabIndex="0"),
            html.P("This page shows it as soon as the first step is written."),
        ],
        id="empty",
        className="panel empty",
    )


def _toolbar() -> html.Div:
    panels = [
        html.Button(panel.title, type="button", title=panel.doc, **{"data-metric": panel.name, "aria-pressed": "false"})
        for panel in PANELS
    ]
    legend = html.Div(
        [
            html.Span(id="legend-title", className="legend-title"),
            html.Div([html.Div(id="legend-bar"), html.Div(id="legend-ticks")], className="legend-scale"),
            html.Span([html.Span(className="swatch zero"), "exactly 0"], className="legend-mark"),
            html.Span([html.Span(className="swatch nan"), "NaN, Inf"], className="legend-mark"),
            html.Span([html.Span(className="swatch absent"), "not observed"], className="legend-mark"),
        ],
        className="legend",
    )
    metric = html.Div(panels, id="metric", className="segments", role="group", **{"aria-label": "Metric"})
    return html.Div([metric, legend], className="toolbar")


def _more(name: str, title: str) -> html.Button:
    """The button that opens the menu of a chart; `assets/export.js` fills it."""
    about = {"data-save": name, "aria-label": f"Save {title}", "aria-haspopup": "menu", "aria-expanded": "false"}
    return html.Button(cards.icon("dots"), className="more", type="button", title="Save", **about)


def _panel(name: str, head: Sequence[Any], body: Any) -> html.Section:
    heading = html.Div(list(head), className="panel-head")
    return html.Section([heading, body], className=f"panel {name}-panel", **{"aria-labelledby": f"{name}-title"})


def _chart(name: str, label: str) -> html.Div:
    return html.Div(id=name, className="chart", role="img", tabIndex="0", **{"aria-label": label})


def _heatmap() -> html.Section:
    head = [
        html.H2("Layer \N{MULTIPLICATION SIGN} step", id="heatmap-title"),
        html.Span(id="focused", className="chip mono"),
        html.Span(id="pooled", className="quiet"),
        html.Button("Reset zoom", id="reset", className="soft", type="button", hidden=True),
        html.Button("Follow", id="follow", className="soft", type="button", hidden=True),
        _more("heatmap", "the heatmap"),
    ]
    return _panel("heatmap", head, _chart("heatmap", "Heatmap of layers over steps. Arrow keys move the cursor."))


def _profile() -> html.Section:
    head = [
        html.H2("Depth profile", id="profile-title"),
        html.Span(id="profile-step", className="quiet mono"),
        html.Span(id="symbol", className="symbol"),
        _more("profile", "the depth profile"),
    ]
    return _panel("profile", head, _chart("profile", "Level of every layer at the cursor's step, one line per run."))


def _slider() -> html.Div:
    # React owns the attributes of its elements: the range is made by view.js so that both do not write its value.
    return html.Div(id="slider", className="slider")


def _readout() -> html.Div:
    return html.Div(
        [html.Span(id="where", className="where"), html.Output(id="value", className="value")], className="readout"
    )


def _history() -> html.Section:
    head = [
        html.H2("Layer history", id="history-title"),
        html.Span(id="history-layer", className="quiet mono"),
        _more("history", "the layer history"),
    ]
    return _panel("history", head, _chart("history", "Level of the cursor's layer over steps, one line per run."))


def _findings(states: Sequence[RunState]) -> html.Section:
    head = [
        html.H2("Findings", id="findings-title"),
        html.Span(cards.findings_count(states), id="findings-count", className="quiet"),
    ]
    return _panel("findings", head, html.Div(cards.findings(states), id="findings", className="scroll"))


def _keys() -> html.Dialog:
    rows = [html.Tr([html.Td(html.Kbd(keys)), html.Td(meaning)]) for keys, meaning in KEYS]
    close = html.Form(html.Button("Close", className="soft", id="close-keys"), method="dialog")
    return html.Dialog([html.H2("Keyboard"), html.Table(html.Tbody(rows)), close], id="keys")
