"""Paths: how the gradient of every sub-layer divides between shortcut and branch, and what is left at each depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keelscope.analysis.norm_gain import cumulative
from keelscope_dashboards.asking import Ask, Choice, Option, Page, missing
from keelscope_dashboards.bands import SharedDepth, bands_of, shared_depth
from keelscope_dashboards.blocks import Axis, Chart, Dash, Level, Line
from keelscope_dashboards.rows import profile_at, recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block

__all__ = ["PAGE"]

_DASHES: tuple[Dash, ...] = ("solid", "dashed", "dotted")


def _choices(_: Ask) -> Sequence[Choice]:
    return (Choice("of", "Runs", (Option("focus", "Focused"), Option("all", "All shown")), ("focus",)),)


def _build(ask: Ask) -> Sequence[Block]:
    wanted = ask.runs if ask.one("of") == "all" else (ask.focus,)
    runs = [shown for shown in wanted if recorded(shown, "sublayers")]
    absent = [missing(shown.name, "sublayers") for shown in wanted if shown not in runs]
    if not runs:
        return absent[:1]
    depth = shared_depth(runs)
    return [
        _parts(ask, runs, depth),
        _gradients(ask, runs, depth),
        _shortcut(ask, runs, depth),
        _single(ask, runs, depth, "branch_gain", "Power of the branch", "v = ms(F) / ms(x), at every sub-layer."),
        _linear(ask, runs, depth, "path_cosine", "Agreement of shortcut and branch", "Cosine of the two parts."),
        _linear(ask, runs, depth, "cosine", "Alignment of branch and stream", "Cosine of F and x in the forward pass."),
        *absent,
    ]


def _parts(ask: Ask, runs: Sequence[Shown], depth: SharedDepth) -> Chart:
    series = {"shortcut_part": "shortcut", "branch_part": "branch"}
    note = "Norm of the part through the shortcut (solid) and through the branch (dashed), at each sub-layer."
    return _chart("Shortcut and branch", depth, _lines(ask, runs, depth, series), note, ask)


def _gradients(ask: Ask, runs: Sequence[Shown], depth: SharedDepth) -> Chart:
    series = {"input_gradient": "whole gradient", "shortcut_only_gradient": "shortcuts only, exact"}
    note = "Norm that arrives (solid), and that would arrive were every branch cut off (dashed): followed exactly."
    return _chart("What reaches each depth", depth, _lines(ask, runs, depth, series), note, ask)


def _shortcut(ask: Ask, runs: Sequence[Shown], depth: SharedDepth) -> Chart:
    """The product of the gains that a gradient without preferred direction meets, and their prediction."""
    lines = []
    for shown in runs:
        gain = profile_at(shown, "sublayers/shortcut_gain", ask.step, linear=True)
        slope = profile_at(shown, "sublayers/predicted_slope", ask.step, linear=True)
        if gain is not None:
            x, left = depth.place(shown.id, gain.depth), cumulative(gain.levels)
            lines.append(Line(f"{shown.name} · product of gains", shown.slot, x, left, run=shown.id))
        if slope is not None:
            x, left = depth.place(shown.id, slope.depth), cumulative(10.0**-slope.levels)
            lines.append(Line(f"{shown.name} · predicted", shown.slot, x, left, dash="dashed", run=shown.id))
    note = (
        "What shortcuts leave of a gradient of random direction: the product of their gains, from the output down. "
        "Dashed: predicted from the branch power, ½ log₁₀(1 + v/α²) summed."
    )
    return _chart("Shortcuts only, estimated", depth, lines, note, ask, levels=(Level(0.0, "nothing lost"),))


def _single(ask: Ask, runs: Sequence[Shown], depth: SharedDepth, name: str, title: str, note: str) -> Chart:
    return _chart(title, depth, _lines(ask, runs, depth, {name: ""}), note, ask)


def _linear(ask: Ask, runs: Sequence[Shown], depth: SharedDepth, name: str, title: str, note: str) -> Chart:
    lines = _lines(ask, runs, depth, {name: ""}, linear=True)
    return Chart(title, depth.axis, Axis(span=1.0), tuple(lines), note=note, levels=(Level(0.0),), size="medium")


def _lines(
    ask: Ask, runs: Sequence[Shown], depth: SharedDepth, series: dict[str, str], *, linear: bool = False
) -> list[Line]:
    lines = []
    for shown in runs:
        for dash, (name, label) in zip(_DASHES, series.items(), strict=False):
            profile = profile_at(shown, f"sublayers/{name}", ask.step, linear=linear)
            if profile is not None:
                text = " · ".join(part for part in (shown.name, label) if part)
                lines.append(depth.line(shown, text, profile, dash=dash))
    return lines


def _chart(
    title: str, depth: SharedDepth, lines: Sequence[Line], note: str, ask: Ask, levels: tuple[Level, ...] = ()
) -> Chart:
    bands = bands_of(ask.focus) if depth.axis.kind == "depth" else ()
    return Chart(title, depth.axis, Axis(log=True, span=2.0), tuple(lines), note=note, spans=bands, levels=levels)


PAGE = Page(
    "paths",
    "Paths",
    "paths",
    "Does the gradient come down the shortcut or through the branches?",
    _build,
    _choices,
    frozenset({"step"}),
)
