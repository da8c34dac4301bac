"""Depth profile: any series over depth at the cursor's step, beside the first and the last step, for every run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keelscope.formatting import decades
from keelscope_dashboards.asking import Ask, Choice, Option, Page, nothing_chosen
from keelscope_dashboards.bands import SharedDepth, bands_of, shared_depth
from keelscope_dashboards.blocks import Axis, Chart, Dash, Level, Line
from keelscope_dashboards.rows import has, plain_series, profile_at
from keelscope_dashboards.wording import typeset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE", "series_options"]

MOST_SERIES = 4
FIRST, LAST = -1, 2**53
_DASHES: dict[str, Dash] = {"now": "solid", "first": "dotted", "last": "dashed"}
FLAT = 4.0  # decades an axis of levels spans at least


def series_options(ask: Ask) -> tuple[Option, ...]:
    """Every ``[step, site]`` series of the focused run, by group."""
    keys = plain_series(ask.focus)
    return tuple(Option(key, key, key.partition("/")[0]) for key in keys)


def _choices(ask: Ask) -> Sequence[Choice]:
    steps = (Option("now", "Cursor"), Option("first", "First step"), Option("last", "Last step"))
    scale = (Option("log", "Log"), Option("linear", "Linear"))
    return (
        Choice("series", "Series", series_options(ask), ("gradients/rms",), MOST_SERIES, "select"),
        Choice("at", "Steps", steps, ("now", "first"), 3),
        Choice("scale", "Values", scale, ("log",)),
    )


def _build(ask: Ask) -> Sequence[Block]:
    depth = shared_depth(ask.runs)
    charts = [_chart(ask, key, depth) for key in ask.chosen["series"]]
    if not charts:
        return [nothing_chosen(f"{ask.focus.name} holds no series over depth.")]
    return charts


def _chart(ask: Ask, key: str, depth: SharedDepth) -> Chart:
    log = ask.one("scale") == "log"
    lines = tuple(line for shown in ask.runs if has(shown, key) for line in _lines(ask, shown, key, depth, log=log))
    return Chart(
        title=key,
        x=depth.axis,
        y=Axis(log=log, span=FLAT if log else 0.0),
        lines=lines,
        note=" ".join(part for part in (_doc(ask.focus, key), _note(ask, key)) if part),
        spans=bands_of(ask.focus) if depth.axis.kind == "depth" else (),
        levels=() if log else (Level(0.0),),
        size="large" if len(ask.chosen["series"]) == 1 else "medium",
    )


def _lines(ask: Ask, shown: Shown, key: str, depth: SharedDepth, *, log: bool) -> Iterator[Line]:
    """The run at every step chosen; what belongs to several parts of a layer is one line per part."""
    steps = {"now": ask.step, "first": FIRST, "last": LAST}
    for at in sorted(ask.chosen["at"], key=lambda name: name == "now"):
        profile = profile_at(shown, key, steps[at], linear=not log)
        if profile is None:
            continue
        for name, part in profile.families():
            label = " · ".join(word for word in (shown.name, name, f"step {profile.step:,}") if word)
            yield depth.line(shown, label, part, dash=_DASHES[at], faint=at != "now")


def _doc(shown: Shown, key: str) -> str:
    group, _, name = key.partition("/")
    with shown.source.reading() as run:
        specs = run.groups[group].statistics if group in run.groups else ()
        return next((spec.doc for spec in specs if spec.name == name), "")


def _note(ask: Ask, key: str) -> str:
    """What the reports say about the same series: decades lost from output to input."""
    said = []
    for shown in ask.runs:
        profile = None if shown.report is None else shown.report.profiles.get(key)
        if profile is not None and np.isfinite(profile.shape.total):
            said.append(f"{shown.name} {typeset(decades(profile.shape.total))}")
    return f"Decades lost from output to input: {', '.join(said)}." if said else ""


PAGE = Page(
    "depth",
    "Depth profile",
    "profile",
    "How large is a quantity at every depth, now and earlier?",
    _build,
    _choices,
    frozenset({"step", "verdict"}),
    single=False,
)
