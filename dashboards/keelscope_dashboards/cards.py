"""What the page says in words: run list, verdict cards and findings, as Dash components made from `RunState`.

Every string that comes from a file becomes a text node; nothing is parsed as HTML or Markdown. Places on the page
that a click leads to are data attributes, which `assets/view.js` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dash import html

from keelscope_dashboards.verdicts import word_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope_dashboards.state import RunState
    from keelscope_dashboards.verdicts import Figure, Note

__all__ = ["findings", "findings_count", "lead", "run_list", "verdict_cards"]

STATUS = {
    "waiting": "Opening",
    "live": "Recording",
    "finished": "Finished",
    "stopped": "Stopped",
    "error": "Cannot be read",
}
SEVERITIES = {
    "error": ("bad", "alert", "problem"),
    "warning": ("warn", "alert", "warning"),
    "info": ("idle", "dot", "note"),
}
MAX_FINDINGS = 60
MAX_CARDS = 12
"""Runs from which only those on show have a card."""


def icon(name: str) -> html.Span:
    """A decorative icon.

    Args:
        name: one of the icons in `assets/keelscope.css`.

    Returns:
        An element that screen readers skip.
    """
    return html.Span(className=f"icon icon-{name}", **{"aria-hidden": "true"})


def marker(slot: int) -> html.Span:
    """The line and marker by which a run is known in every chart."""
    return html.Span(className=f"marker slot-{slot}", **{"aria-hidden": "true"})


def run_list(states: Sequence[RunState]) -> html.Ul:
    """One row per run: marker, name, what it is doing, and whether it is drawn.

    Args:
        states: all runs.

    Returns:
        The list.
    """
    return html.Ul([_run_row(state) for state in states], className="runs")


def _run_row(state: RunState) -> html.Li:
    word = STATUS[state.status]
    about = state.error if state.error else f"{word} · {state.model}" if state.model else word
    text = html.Span(
        [
            html.Span(state.name, className="name mono"),
            html.Span([html.Span(className=f"lamp {state.status}"), about], className="about"),
        ],
        className="two-lines",
    )
    select = html.Button(
        [marker(state.slot) if not state.error else icon("alert"), text],
        className="run",
        type="button",
        disabled=bool(state.error),
        id=f"run-{state.id}",
        title=state.error or state.name,
        **{"data-run": state.id},
    )
    return html.Li([select] if state.error else [select, _eye(state)], className="run-row", **{"data-row": state.id})


def _eye(state: RunState) -> html.Button:
    return html.Button(
        icon("eye"),
        className="eye",
        type="button",
        id=f"show-{state.id}",
        **{"data-show": state.id, "aria-pressed": "true", "aria-label": f"Draw {state.name}"},
    )


def verdict_cards(states: Sequence[RunState], dealt: Sequence[str] | None = None) -> list[Any]:
    """One card per run: the verdict in a word and a sentence, up to three numbers, a picture.

    Args:
        states: all runs.
        dealt: ids of the runs that get a card where there are many.

    Returns:
        The cards, at the end those of files that cannot be read, with the reason.
    """
    readable = [state for state in states if not state.error]
    if len(readable) > MAX_CARDS:
        readable = [state for state in readable if dealt is None or state.id in dealt][:MAX_CARDS]
    broken = [state for state in states if state.error][:MAX_CARDS]
    return [*map(_card, readable), *map(_broken_card, broken)]


def lead(sentence: str) -> str:
    """The sentence up to its slope, which the numbers of the card say again; the whole is in the tooltip.

    Args:
        sentence: of a verdict.

    Returns:
        Its beginning.

    Example:
        >>> lead("It shrinks: x0.1 over 9 blocks, slope 0.1 decades per block, S = 1.0.")
        'It shrinks: x0.1 over 9 blocks.'
    """
    beginning, cut, _ = sentence.partition(", slope ")
    return f"{beginning}." if cut else sentence


def _card(state: RunState) -> html.Button:
    numbers = html.Span([_number(figure) for figure in state.verdict.figures], className="numbers")
    picture = html.Canvas(className="thumb", **{"data-thumb": state.id, "aria-hidden": "true"})
    return html.Button(
        [
            _card_head(state),
            html.Span(lead(state.verdict.sentence), className="sentence", title=state.verdict.sentence),
            html.Span([numbers, picture], className="evidence"),
        ],
        className="card",
        type="button",
        id=f"card-{state.id}",
        **{"data-run": state.id},
    )


def _broken_card(state: RunState) -> html.Div:
    sentence = html.Span(state.error, className="sentence", title=state.error)
    return html.Div([_card_head(state), sentence], className="card broken", role="note")


def _card_head(state: RunState) -> html.Span:
    word, tone, symbol = word_of(state.verdict)
    pill = html.Span([icon(symbol), word], className=f"pill {tone}")
    mark = icon("file") if state.error else marker(state.slot)
    name = html.Span(state.name, className="name mono", title=state.name)
    return html.Span([mark, name, pill], className="card-head")


def _number(figure: Figure) -> html.Span:
    return html.Span(
        [html.Span(figure.label, className="label"), html.Span(figure.value, className="value")],
        className="number",
        title=figure.hint,
    )


def findings(states: Sequence[RunState]) -> Any:
    """All findings of all runs, the most severe first, each leading to its place in the charts.

    Args:
        states: all runs.

    Returns:
        A list, or a sentence when there is nothing to say.
    """
    order = list(SEVERITIES)
    pairs = [(state, note) for state in states for note in state.verdict.notes]
    pairs.sort(key=lambda pair: order.index(pair[1].severity))
    if not pairs:
        waiting = any(state.verdict.headline == "pending" for state in states)
        return html.P("Reading the runs." if waiting else "No rule has anything to say.", className="quiet")
    rows = [_finding(state, note) for state, note in pairs[:MAX_FINDINGS]]
    if len(pairs) > MAX_FINDINGS:
        more = f"{len(pairs) - MAX_FINDINGS:,} more; the page Diagnostics has those of the runs on show."
        rows.append(html.Li(more, className="quiet"))
    return html.Ul(rows, className="findings")


def _finding(state: RunState, note: Note) -> html.Li:
    tone, symbol, word = SEVERITIES[note.severity]
    place = {"data-run": state.id, "data-site": note.site, "data-step": str(note.step), "data-rule": note.rule}
    title = f"{note.statement} {note.remedy}".strip()
    text = html.Div(
        [
            html.Div([html.Strong(_spoken(note.rule)), html.Span(state.name, className="name mono")], className="what"),
            html.Div(note.statement, className="statement"),
        ],
        title=title,
    )
    badge = html.Span([icon(symbol), html.Span(word, className="unseen")], className=f"badge {tone}")
    show = html.Button("Show", className="show", type="button", **place, **{"aria-label": f"Show {_spoken(note.rule)}"})
    return html.Li([badge, text, show])


def _spoken(rule: str) -> str:
    """The name of a rule as words: ``shortcut_attenuated`` becomes "Shortcut attenuated"."""
    return rule.replace("_", " ").capitalize()


def findings_count(states: Sequence[RunState]) -> str:
    """How many findings of each severity there are, in words.

    Args:
        states: all runs.

    Returns:
        For example ``"2 problems, 1 note"``; empty when there is none.
    """
    severities = [note.severity for state in states for note in state.verdict.notes]
    parts = [
        f"{count} {word}{'s' if count > 1 else ''}"
        for name, (_, _, word) in SEVERITIES.items()
        if (count := severities.count(name))
    ]
    return ", ".join(parts)
