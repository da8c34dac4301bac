"""Single layer: every statistic of what lies at the cursor's depth, over all steps, as small charts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from keelscope.formatting import number
from keelscope_dashboards.asking import Ask, Choice, Option, Page, nothing_chosen
from keelscope_dashboards.blocks import Axis, Chart, Dash, Heading, Line, Notice
from keelscope_dashboards.levels import Kind
from keelscope_dashboards.panels import series_panel
from keelscope_dashboards.rows import groups_of, log_fits
from keelscope_dashboards.wording import typeset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block
    from keelscope_dashboards.levels import LayerAxis
    from keelscope_dashboards.pooling import Tile

__all__ = ["PAGE"]

BUDGET_SECONDS = 1.0  # of one answer; what a long run needs longer for comes with the next
DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted")


def _choices(ask: Ask) -> Sequence[Choice]:
    with ask.focus.source.reading() as run:
        groups = tuple(Option(name, name.replace("_", " ")) for name in groups_of(run))
    everything = Option("all", "All groups")
    of = (Option("focus", "Focused"), Option("all", "All shown"))
    return (
        Choice("group", "Group", (everything, *groups), ("all",), look="select"),
        Choice("of", "Runs", of, ("focus",)),
    )


def _build(ask: Ask) -> Sequence[Block]:
    with ask.focus.source.reading() as run:
        groups = groups_of(run)
    wanted = groups if ask.one("group") == "all" else {ask.one("group"): groups[ask.one("group")]}
    runs = ask.runs if ask.one("of") == "all" else (ask.focus,)
    late = time.monotonic() + BUDGET_SECONDS
    blocks: list[Block] = []
    for group, statistics in wanted.items():
        charts: list[Chart] = []
        for name in statistics:
            if charts and time.monotonic() > late:
                waiting = Notice("Reading the run", "The other statistics follow.", pending=True)
                return [*blocks, *_drawn(ask, group, statistics, charts), waiting]
            charts.extend(chart for chart in [_chart(ask, runs, f"{group}/{name}")] if chart.lines)
        blocks.extend(_drawn(ask, group, statistics, charts))
    return blocks or [nothing_chosen(f"Nothing is recorded at depth {ask.depth}.")]


def _drawn(ask: Ask, group: str, statistics: Sequence[str], charts: Sequence[Chart]) -> list[Block]:
    """The charts of a group under its heading; what never changed is said there in words."""
    if not charts:
        return []
    constant = {chart.title: value for chart in charts if (value := _constant(chart)) is not None}
    said = ", ".join(f"{name} {typeset(number(value))}" for name, value in constant.items())
    heading = _heading(ask, group, statistics, f" · always {said}" if said else "")
    return [heading, *(chart for chart in charts if chart.title not in constant)]


def _constant(chart: Chart) -> float | None:
    """The value that every line of a chart holds on every step; None where there are several."""
    values = np.concatenate([line.y for line in chart.lines])
    known = values[~np.isnan(values)]
    changed = chart.y.log or any(line.bad is not None and line.bad.size for line in chart.lines)
    return float(known[0]) if not changed and known.size and (known == known[0]).all() else None


def _heading(ask: Ask, group: str, statistics: Sequence[str], more: str) -> Heading:
    """The group, and which of its sites lie at this depth."""
    panel = series_panel(f"{group}/{statistics[0]}", scale="linear")
    axis = ask.focus.source.axis(panel)
    entries = _entries(axis, ask.depth)
    tile = ask.focus.source.column(panel, entries[0] if entries else 0)
    note = _named([axis.labels[i] for i in entries])
    pooled = f" · largest of every {tile.rows:,} recorded steps" if tile.rows > 1 else ""
    return Heading(group.replace("_", " ").capitalize(), note + pooled + more)


def _named(labels: Sequence[str]) -> str:
    """What lies at this depth; of two or three, how each is drawn."""
    if len(labels) < 2:
        return ", ".join(labels)
    if len(labels) <= len(DASHES):
        return ", ".join(f"{label} ({dash})" for label, dash in zip(labels, DASHES, strict=False))
    return f"{labels[0]} (solid) to {labels[-1]} (dotted)"


def _chart(ask: Ask, runs: Sequence[Shown], key: str) -> Chart:
    found = [column for shown in runs for column in _columns(ask, shown, key)]
    log = log_fits([values for *_, values, _ in found])
    lines = tuple(
        Line(label, shown.slot, steps, _log10(values) if log else values, bad=bad, run=shown.id, dash=dash)
        for shown, label, dash, steps, values, bad in found
    )
    return Chart(key.partition("/")[2], Axis("", "step"), Axis(log=log), lines, size="small")


def _columns(
    ask: Ask, shown: Shown, key: str
) -> Iterator[tuple[Shown, str, Dash, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]]:
    """What the run recorded at the cursor's depth, and where it was NaN; further parts of a layer in other dashes."""
    with shown.source.reading() as run:
        if key not in run:
            return
    panel = series_panel(key, scale="linear")
    axis = shown.source.axis(panel)
    for n, entry in enumerate(_entries(axis, ask.depth)):
        tile = shown.source.column(panel, entry)
        values = _column(tile, 0)
        bad = tile.kinds[:, 0] == Kind.NAN
        if not np.isnan(values).all():  # a statistic that does not apply is NaN throughout
            steps, label = _middle(tile), f"{shown.name} · {axis.labels[entry]}"
            yield shown, label, DASHES[min(n, 2)], steps, values, steps[bad]


def _entries(axis: LayerAxis, depth: int) -> list[int]:
    """The entries of an axis at one depth; where none is, the next one towards the output."""
    depths = np.array(axis.depths or range(1, len(axis) + 1))
    if not depths.size:
        return []
    above = depths[depths >= depth]
    return np.flatnonzero(depths == (above.min() if above.size else depths.max())).tolist()


def _column(tile: Tile, entry: int) -> NDArray[np.float64]:
    """One entry of a linear tile with NaN where there is no value and the infinities as they are."""
    values = tile.deviations[:, entry].astype(np.float64)
    kinds = tile.kinds[:, entry]
    values[kinds == Kind.INF] = np.inf
    values[(kinds == Kind.NAN) | (kinds == Kind.ABSENT)] = np.nan
    return values


def _middle(tile: Tile) -> NDArray[np.float64]:
    return np.asarray((tile.first + tile.last) / 2)


def _log10(values: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        return np.asarray(np.log10(values))


PAGE = Page(
    "layer",
    "Single layer",
    "layers",
    "What happened at one depth while the model trained?",
    _build,
    _choices,
    frozenset({"depth"}),
)
