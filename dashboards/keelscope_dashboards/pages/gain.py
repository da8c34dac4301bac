"""Norm gain: what every norm does to a gradient, and their product over depth beside what the branches predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from keelscope.analysis.norm_gain import cumulative, shortcut_norms
from keelscope_dashboards.asking import Ask, Choice, Option, Page, missing, nothing_chosen
from keelscope_dashboards.bands import SharedDepth, shared_depth
from keelscope_dashboards.blocks import Axis, Chart, Heading, Heat, Level, Line
from keelscope_dashboards.rows import profile_at, recorded, row_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE"]

GAIN, QUANTILES, SLOPE = "norms/jacobian_gain", "norms/jacobian_gain_quantile", "sublayers/predicted_slope"
GAIN_SPAN, TOTAL_SPAN = 1.0, 4.0
GAIN_LIMIT = 1.0  # decades at the ends of the heatmap's colours


def _choices(ask: Ask) -> Sequence[Choice]:
    norms = (Option("shortcut", "On the shortcut"), Option("branch", "In the branches"), Option("all", "All"))
    return (
        Choice("norms", "Norms", norms, ("shortcut",)),
        Choice("heat", "Heatmap", (Option("no", "Hidden"), Option("yes", "Shown")), ("no",)),
    )


def _build(ask: Ask) -> Sequence[Block]:
    with_gain = [shown for shown in ask.runs if recorded(shown, "norms")]
    if not with_gain:
        return [missing(ask.focus.name, "norms")]
    depth = shared_depth(with_gain)
    blocks: list[Block] = []
    if lines := tuple(line for shown in with_gain for line in _gains(ask, shown, depth)):
        blocks.append(_gain_chart(lines, depth))
    else:
        blocks.append(_none_chosen(ask, with_gain))
    if totals := tuple(line for shown in with_gain for line in _totals(ask, shown, depth)):
        blocks.append(_total_chart(totals, depth))
    if ask.one("heat") == "yes" and ask.focus in with_gain:
        blocks.append(Heat(ask.focus.name, ask.focus.id, GAIN, limit=GAIN_LIMIT, doc="Decades about a gain of 1"))
    return [*blocks, *(missing(shown.name, "norms") for shown in ask.runs if shown not in with_gain)]


def _none_chosen(ask: Ask, runs: Sequence[Shown]) -> Block:
    where = {"shortcut": "on the shortcut", "branch": "in a branch"}.get(ask.one("norms"), "known")
    names = ", ".join(shown.name for shown in runs)
    if where == "on the shortcut":
        return Heading(
            "No norm lies on the shortcut",
            f"{names}: the gradient passes the sums without a norm, so nothing multiplies along the depth. "
            "Choose “In the branches” to see the norms there.",
        )
    return nothing_chosen(f"{names}: no norm is {where}.")


def _gain_chart(lines: tuple[Line, ...], depth: SharedDepth) -> Chart:
    return Chart(
        "Gain of every norm",
        depth.axis,
        Axis(log=True, span=GAIN_SPAN),
        lines,
        note="Line: ‖J‖ / √d, root mean square over tokens. Band: 10 % to 90 % of the tokens.",
        doc="The factor on a gradient without preferred direction; 1 passes it unchanged.",
        levels=(Level(0.0, "gain 1"),),
        size="medium",
    )


def _total_chart(lines: tuple[Line, ...], depth: SharedDepth) -> Chart:
    predicted = any(line.dash == "dashed" for line in lines)
    theory = (
        "Dashed: what the measured branch power predicts, the sum of ½ log₁₀(1 + v/α²)."
        if predicted
        else "Record the probe sublayers to see what the branch power predicts."
    )
    return Chart(
        "Product of the gains, from the output down",
        depth.axis,
        Axis(log=True, span=TOTAL_SPAN),
        lines,
        note=theory,
        doc="What the norms alone leave of a gradient that enters at the output; weights of the shortcut not included.",
        levels=(Level(0.0, "nothing lost"),),
        size="medium",
    )


def _kept(ask: Ask, shown: Shown, paths: Sequence[str]) -> NDArray[np.bool_]:
    """Which norms were chosen."""
    with shown.source.reading() as run:
        on_shortcut = shortcut_norms(run.info.sublayers)
    placed = np.array([path in on_shortcut for path in paths], dtype=bool)
    chosen = ask.one("norms")
    return placed if chosen == "shortcut" else ~placed if chosen == "branch" else np.ones(len(paths), dtype=bool)


def _gains(ask: Ask, shown: Shown, depth: SharedDepth) -> list[Line]:
    profile, band = profile_at(shown, GAIN, ask.step), row_at(shown, QUANTILES, ask.step)
    if profile is None:
        return []
    kept = _kept(ask, shown, profile.axis.labels)
    if not kept.any():
        return []
    x = depth.place(shown.id, profile.depth[kept])
    low = high = None
    if band is not None and len(band[1]) == len(kept):
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = np.log10(band[1][kept, 0]), np.log10(band[1][kept, -1])
    return [Line(f"{shown.name} · step {profile.step:,}", shown.slot, x, profile.levels[kept], low, high, run=shown.id)]


def _totals(ask: Ask, shown: Shown, depth: SharedDepth) -> list[Line]:
    """The product of the gains on the shortcut, and its prediction where sub-layers were recorded."""
    lines = []
    gains, slope = profile_at(shown, GAIN, ask.step, linear=True), profile_at(shown, SLOPE, ask.step, linear=True)
    if gains is not None:
        with shown.source.reading() as run:
            on_shortcut = shortcut_norms(run.info.sublayers)
        kept = np.array([path in on_shortcut for path in gains.axis.labels], dtype=bool)
        if kept.any():
            x = depth.place(shown.id, gains.depth[kept])
            lines.append(Line(shown.name, shown.slot, x, cumulative(gains.levels[kept]), run=shown.id))
    if slope is not None and lines:
        x, lost = depth.place(shown.id, slope.depth), cumulative(10.0 ** -slope.levels)
        lines.append(Line(f"{shown.name} · predicted", shown.slot, x, lost, dash="dashed", faint=True, run=shown.id))
    return lines


PAGE = Page(
    "gain",
    "Norm gain",
    "gain",
    "How much of the gradient do the norms take away?",
    _build,
    _choices,
    frozenset({"step"}),
)
