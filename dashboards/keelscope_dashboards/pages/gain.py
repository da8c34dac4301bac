"""Norm gain: what every norm does to a gradient, and their product over depth beside what the branches predict.

A norm that lies on a weighted sum ``n(a x + F)`` is shown with the weight a, unless that is left out: together they are
what the shortcut passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from keelscope.analysis.norm_gain import cumulative, shortcut_weights
from keelscope_dashboards.asking import Ask, Choice, Option, Page, missing, nothing_chosen
from keelscope_dashboards.bands import SharedDepth, shared_depth
from keelscope_dashboards.blocks import Axis, Chart, Heading, Heat, Level, Line
from keelscope_dashboards.panels import series_panel
from keelscope_dashboards.rows import profile_at, recorded, row_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE"]

GAIN, QUANTILES, SLOPE = "norms/jacobian_gain", "norms/jacobian_gain_quantile", "sublayers/predicted_slope"
GAIN_SPAN, TOTAL_SPAN = 1.0, 4.0


def _choices(_: Ask) -> Sequence[Choice]:
    norms = (Option("shortcut", "On the shortcut"), Option("branch", "In the branches"), Option("all", "All"))
    return (
        Choice("norms", "Norms", norms, ("shortcut",)),
        Choice("weight", "Shortcut weight a", (Option("in", "Multiplied in"), Option("out", "Left out")), ("in",)),
        Choice("heat", "Heatmap", (Option("yes", "Shown"), Option("no", "Hidden")), ("yes",)),
    )


def _build(ask: Ask) -> Sequence[Block]:
    with_gain = [shown for shown in ask.runs if recorded(shown, "norms")]
    if not with_gain:
        return [missing(ask.focus.name, "norms")]
    depth = shared_depth(with_gain)
    blocks: list[Block] = []
    if lines := tuple(line for shown in with_gain for line in _gains(ask, shown, depth)):
        blocks.append(_gain_chart(ask, lines, depth))
    else:
        blocks.append(_none_chosen(ask, with_gain))
    if totals := tuple(line for shown in with_gain for line in _totals(ask, shown, depth)):
        blocks.append(_total_chart(totals, depth))
    if ask.one("heat") == "yes" and ask.focus in with_gain:
        blocks.append(_heat(ask))
    return [*blocks, *(missing(shown.name, "norms") for shown in ask.runs if shown not in with_gain)]


def _heat(ask: Ask) -> Heat:
    """The gains of the focused run over steps: of the norms chosen where a layer has several."""
    axis = ask.focus.source.axis(series_panel(GAIN))
    placed, _ = _weights(ask, ask.focus, axis.labels)
    kept = [label for label, on in zip(axis.labels, placed, strict=True) if on == (ask.one("norms") == "shortcut")]
    names = {label.rpartition(".")[2] for label in kept}
    part = names.pop() if len(names) == 1 and len(kept) < len(axis) and ask.one("norms") != "all" else ""
    return Heat(f"Gain over steps, {ask.focus.name}", ask.focus.id, GAIN, diverging=False, part=part, size="wide")


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


def _gain_chart(ask: Ask, lines: tuple[Line, ...], depth: SharedDepth) -> Chart:
    weighted = ask.one("weight") == "in" and ask.one("norms") != "branch"
    return Chart(
        "Shortcut weight times gain of every norm" if weighted else "Gain of every norm",
        depth.axis,
        Axis(log=True, span=GAIN_SPAN),
        lines,
        note=f"Line: {'a ' if weighted else ''}‖J‖ / √d, root mean square over tokens. Band: 10 to 90 % of the tokens.",
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
        doc="What the shortcut leaves of a gradient that enters at the output.",
        levels=(Level(0.0, "nothing lost"),),
        size="medium",
    )


def _weights(ask: Ask, shown: Shown, paths: Sequence[str]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Which norms lie on the shortcut, and the weight that each is shown with."""
    with shown.source.reading() as run:
        known = shortcut_weights(run.info.sublayers)
    weights = np.array([known.get(path, 1.0) for path in paths], dtype=np.float64)
    placed = np.array([path in known for path in paths], dtype=np.bool_)
    return placed, weights if ask.one("weight") == "in" else np.ones_like(weights)


def _gains(ask: Ask, shown: Shown, depth: SharedDepth) -> list[Line]:
    profile, band = profile_at(shown, GAIN, ask.step), row_at(shown, QUANTILES, ask.step)
    if profile is None:
        return []
    placed, weights = _weights(ask, shown, profile.axis.labels)
    chosen = ask.one("norms")
    kept = placed if chosen == "shortcut" else ~placed if chosen == "branch" else np.ones_like(placed)
    if not kept.any():
        return []
    x, shift = depth.place(shown.id, profile.depth[kept]), np.log10(weights[kept])
    low = high = None
    if band is not None and len(band[1]) == len(kept):
        with np.errstate(divide="ignore", invalid="ignore"):
            low, high = np.log10(band[1][kept, 0]) + shift, np.log10(band[1][kept, -1]) + shift
    label = f"{shown.name} · step {profile.step:,}"
    return [Line(label, shown.slot, x, profile.levels[kept] + shift, low, high, run=shown.id)]


def _totals(ask: Ask, shown: Shown, depth: SharedDepth) -> list[Line]:
    """The product of the gains on the shortcut, and its prediction where sub-layers were recorded."""
    lines = []
    gains, slope = profile_at(shown, GAIN, ask.step, linear=True), profile_at(shown, SLOPE, ask.step, linear=True)
    if gains is not None:
        kept, weights = _weights(ask, shown, gains.axis.labels)
        if kept.any():
            x, left = depth.place(shown.id, gains.depth[kept]), cumulative((weights * gains.levels)[kept])
            lines.append(Line(shown.name, shown.slot, x, left, run=shown.id))
    if slope is not None and lines:
        x, lost = depth.place(shown.id, slope.depth), cumulative(10.0**-slope.levels)
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
    single=False,
)
