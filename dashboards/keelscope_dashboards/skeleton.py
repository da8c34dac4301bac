"""What is painted before any script has run: the frame of the page and the verdicts, as plain HTML.

It stands beside Dash's entry point and is hidden by the style sheet as soon as the real page is there. Same classes as
`page` and `cards`, so nothing jumps. Every string from a file is escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from keelscope_dashboards.cards import lead
from keelscope_dashboards.pages import PAGES
from keelscope_dashboards.verdicts import word_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope_dashboards.asking import Page
    from keelscope_dashboards.state import RunState

__all__ = ["skeleton"]

MAX_CARDS = 12
BOXES = (
    "panel heatmap-panel",
    "panel profile-panel",
    "slider",
    "readout",
    "panel history-panel",
    "panel findings-panel",
)


def skeleton(states: Sequence[RunState], title: str, page: Page) -> str:
    """The page without its charts.

    Args:
        states: all runs.
        title: what is on show.
        page: the page that is asked for.

    Returns:
        HTML.
    """
    body = _overview(states) if page.build is None else f'<div class="page-head"><h1>{escape(page.title)}</h1></div>'
    links = "".join(f'<span class="page-link">{escape(one.title)}</span>' for one in PAGES)
    return (
        '<div id="skeleton" aria-hidden="true"><div class="top"><span class="logo"></span>'
        f'<span class="brand">keelscope</span><span class="place mono">{escape(title)}</span></div>'
        f'<div class="side"><div class="pages">{links}</div><h2>Runs</h2></div><div class="main">{body}</div></div>'
    )


def _overview(states: Sequence[RunState]) -> str:
    order = sorted(states, key=lambda state: bool(state.error))
    cards = "".join(_card(state) for state in order[:MAX_CARDS])
    panels = "".join(f'<div class="{box}"></div>' for box in BOXES)
    charts = f'<div class="toolbar"></div><div class="linked">{panels}</div>' if states else ""
    return f'<div class="cards">{cards}</div>{charts}'


def _card(state: RunState) -> str:
    word, tone, symbol = word_of(state.verdict)
    mark = '<span class="icon icon-file"></span>' if state.error else f'<span class="marker slot-{state.slot}"></span>'
    numbers = "".join(
        f'<span class="number"><span class="label">{escape(figure.label)}</span>'
        f'<span class="value">{escape(figure.value)}</span></span>'
        for figure in state.verdict.figures
    )
    return (
        f'<div class="card"><span class="card-head">{mark}<span class="name mono">{escape(state.name)}</span>'
        f'<span class="pill {tone}"><span class="icon icon-{symbol}"></span>{escape(word)}</span></span>'
        f'<span class="sentence">{escape(lead(state.verdict.sentence))}</span>'
        f'<span class="evidence"><span class="numbers">{numbers}</span><span class="thumb"></span></span></div>'
    )
