"""Norm gain: what every norm does to a gradient, and their product over depth beside what the branches predict.

A norm that lies on a weighted sum ``n(a x + F)`` is shown with the weight a, unless that is left out: together they are
what the shortcut passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keelscope.analysis.norm_gain import cumulative, shortcut_weights
from keelscope_dashboards.asking import Ask, Choice, Option, Page, missing, nothing_chosen
from keelscope_dashboards.bands import SharedDepth, shared_depth
from keelscope_dashboards.blocks import Axis, Chart, Dash, Heading, Heat, Level, Line
from keelscope_dashboards.depth import parts_of
from keelscope_dashboards.panels import series_panel
from keelscope_dashboards.rows import profile_at, recorded, row_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block
    from keelscope_dashboards.levels import LayerAxis

__all__ = ["PAGE"]

GAIN, QUANTILES, SLOPE = "norms/jacobian_gain", "norms/jacobian_gain_quantile", "sublayers/predicted_slope"
PLACES: dict[str, tuple[str, Dash]] = {
    "shortcut": ("shortcut", "solid"),
    "branch": ("branch", "dashed"),
    "elsewhere": ("elsewhere", "dotted"),
}
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
    axis, chosen = ask.focus.source.axis(series_panel(GAIN)), ask.one("norms")
    kept = {label.rpartition(".")[2] for label, place in _placed(ask.focus, axis) if chosen in {place, "all"}}
    part = kept.pop() if len(kept) == 1 and chosen != "all" and parts_of(axis) else ""
    with ask.focus.source.reading() as run:
        weighted = any(weight != 1 for weight in shortcut_weights(run.info.sublayers).values())
    title = f"Gain over steps{', without the weight a' if weighted else ''}, {ask.focus.name}"
    return Heat(title, ask.focus.id, GAIN, diverging=False, part=part, size="wide")


def _placed(shown: Shown, axis: LayerAxis) -> list[tuple[str, str]]:
    return list(zip(axis.labels, _places(shown, axis.labels).tolist(), strict=True))


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
        "From the output down. Dashed: what the branch power predicts, the sum of ½ log₁₀(1 + v/α²)."
        if predicted
        else "Record the probe sublayers to see what the branch power predicts."
    )
    return Chart(
        "Shortcuts only, estimated: product of the gains",
        depth.axis,
        Axis(log=True, span=TOTAL_SPAN),
        lines,
        note=theory,
        doc="What the shortcuts leave of a gradient of random direction; the exact one is on the page Paths.",
        levels=(Level(0.0, "nothing lost"),),
        size="medium",
    )


def _weights(ask: Ask, shown: Shown, paths: Sequence[str]) -> NDArray[np.float64]:
    """The weight that each norm is shown with."""
    with shown.source.reading() as run:
        known = shortcut_weights(run.info.sublayers)
    weighted = ask.one("weight") == "in"
    return np.array([known.get(path, 1.0) if weighted else 1.0 for path in paths], dtype=np.float64)


def _places(shown: Shown, paths: Sequence[str]) -> NDArray[np.str_]:
    """Where each norm lies: on the shortcut, in a branch, or elsewhere (after the embedding, before the head)."""
    with shown.source.reading() as run:
        on_shortcut = shortcut_weights(run.info.sublayers)
        in_branch = {sublayer.norm_before for sublayer in run.info.sublayers}
    return np.array(
        ["shortcut" if path in on_shortcut else "branch" if path in in_branch else "elsewhere" for path in paths]
    )


def _gains(ask: Ask, shown: Shown, depth: SharedDepth) -> Iterator[Line]:
    """The gains at the cursor's step, one line per place that a norm can have."""
    profile, band = profile_at(shown, GAIN, ask.step), row_at(shown, QUANTILES, ask.step)
    if profile is None:
        return
    places, weights = _places(shown, profile.axis.labels), _weights(ask, shown, profile.axis.labels)
    for place in PLACES if ask.one("norms") == "all" else (ask.one("norms"),):
        kept = places == place
        if not kept.any():
            continue
        x, shift = depth.place(shown.id, profile.depth[kept]), np.log10(np.abs(weights[kept]))
        low = high = None
        if band is not None and len(band[1]) == len(kept):
            with np.errstate(divide="ignore", invalid="ignore"):
                low, high = np.log10(band[1][kept, 0]) + shift, np.log10(band[1][kept, -1]) + shift
        label = f"{shown.name} · {PLACES[place][0]} · step {profile.step:,}"
        y, dash = profile.levels[kept] + shift, PLACES[place][1]
        yield Line(label, shown.slot, x, y, low, high, dash=dash, run=shown.id)


def _totals(ask: Ask, shown: Shown, depth: SharedDepth) -> list[Line]:
    """The product of the gains on the shortcut, and its prediction where sub-layers were recorded."""
    lines = []
    gains, slope = profile_at(shown, GAIN, ask.step, linear=True), profile_at(shown, SLOPE, ask.step, linear=True)
    if gains is not None:
        labels = gains.axis.labels
        kept, weights = _places(shown, labels) == "shortcut", _weights(ask, shown, labels)
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
