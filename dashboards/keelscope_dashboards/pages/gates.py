"""Gates: the values of gates and residual weights over depth and steps, how many are saturated, and their gradient."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from keelscope_dashboards.asking import Ask, Choice, Option, Page, missing
from keelscope_dashboards.blocks import Axis, Chart, Heading, Heat, Level, Line, Notice, Place, Table
from keelscope_dashboards.rows import profile_at, recorded
from keelscope_dashboards.wording import typeset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope_dashboards.asking import Shown
    from keelscope_dashboards.blocks import Block
    from keelscope_dashboards.rows import Profile

__all__ = ["PAGE"]

MAX_ROWS = 100


def _choices(_: Ask) -> Sequence[Choice]:
    scale = (Option("linear", "Linear"), Option("log", "Log"))
    of = (Option("focus", "Focused"), Option("all", "All shown"))
    return Choice("scale", "Values", scale, ("linear",)), Choice("of", "Runs", of, ("focus",))


def _build(ask: Ask) -> Sequence[Block]:
    wanted = ask.runs if ask.one("of") == "all" else (ask.focus,)
    runs = [shown for shown in wanted if recorded(shown, "gates")]
    absent = [_absent(shown) for shown in wanted if shown not in runs]
    if not runs:
        return absent[:1]
    linear = ask.one("scale") == "linear"
    charts = [_values(ask, runs, linear=linear), _saturated(ask, runs), _gradient(ask, runs)]
    drawn = [chart for chart in charts if any(np.isfinite(line.y).any() for line in chart.lines)]
    constant = [shown.name for shown in runs if _is_constant(shown)]
    said = [Heading("Constant weights", _constants(constant))] if constant else []
    heats = [_heat(shown, linear=linear) for shown in runs[:1] if shown.name not in constant]
    if len(drawn) + len(heats) == 1:
        drawn = [replace(chart, size="wide") for chart in drawn]
    return [*said, *drawn, *heats, _table(ask, runs[0]), *absent]


def _is_constant(shown: Shown) -> bool:
    """Whether all weights of a run are numbers of the code, which nothing trains."""
    with shown.source.reading() as run:
        return all(site.kind == "constant" for site in run.groups["gates"].sites)


def _constants(names: Sequence[str]) -> str:
    return f"{', '.join(names)}: numbers of the code, never trained, so there is no gradient and nothing to saturate."


def _absent(shown: Shown) -> Block:
    with shown.source.reading() as run:
        known = "gates" in run.groups
    if known or _by_default(shown):
        why = "There is no weight other than 1 on a shortcut or a branch, as in plain Pre-LN and Post-LN."
        return Notice(f"{shown.name} has no gates", why)
    notice = missing(shown.name, "gates")
    why = "The default probes record gates; this run was recorded with others. To record them:"
    return Notice(notice.title, why, notice.code)


def _by_default(shown: Shown) -> bool:
    """Whether the run was recorded with the default probes, of which gates leaves out models that have none."""
    with shown.source.reading() as run:
        return {"outputs", "gradients", "parameter_gradients", "norms"} <= run.groups.keys()


def _axis(profile: Profile) -> Axis:
    return Axis("gate, in order of depth", "value") if len(np.unique(profile.depth)) < len(profile.depth) else _DEPTH


_DEPTH = Axis("sub-layer (1 = input)", "depth")


def _values(ask: Ask, runs: Sequence[Shown], *, linear: bool) -> Chart:
    """The mean weight of every gate, with the band its entries span."""
    lines = []
    axis = _DEPTH
    for shown in runs:
        mean, low, high = (
            profile_at(shown, f"gates/{name}", ask.step, linear=linear) for name in ("value", "minimum", "maximum")
        )
        if mean is not None:
            axis = _axis(mean)
            edges = (None if low is None else low.levels, None if high is None else high.levels)
            lines.append(Line(shown.name, shown.slot, _places(mean), mean.levels, *edges, run=shown.id))
    note = "Line: mean effective weight. Band: smallest to largest entry."
    return Chart("Value of every gate", axis, Axis(log=not linear, span=0.5), tuple(lines), note=note)


def _places(profile: Profile) -> np.ndarray:
    """Depths, or the numbers of the gates where several lie at one depth."""
    several = len(np.unique(profile.depth)) < len(profile.depth)
    return np.arange(1.0, len(profile.depth) + 1) if several else profile.depth


def _saturated(ask: Ask, runs: Sequence[Shown]) -> Chart:
    note = "Share of the entries whose local slope is below 0.001: they no longer learn."
    return _single(ask, runs, "saturated_fraction", "Saturated share", note, linear=True)


def _gradient(ask: Ask, runs: Sequence[Shown]) -> Chart:
    note = "Norm of the gradient at the parameter, or at the output of a token gate."
    return _single(ask, runs, "gradient", "Gradient of every gate", note, linear=False)


def _single(ask: Ask, runs: Sequence[Shown], name: str, title: str, note: str, *, linear: bool) -> Chart:
    lines, axis = [], _DEPTH
    for shown in runs:
        profile = profile_at(shown, f"gates/{name}", ask.step, linear=linear)
        if profile is not None:
            axis = _axis(profile)
            lines.append(Line(shown.name, shown.slot, _places(profile), profile.levels, run=shown.id))
    levels = (Level(1.0, "all"), Level(0.0)) if linear else ()
    return Chart(title, axis, Axis(log=not linear, span=1.0), tuple(lines), note=note, levels=levels)


def _heat(shown: Shown, *, linear: bool) -> Heat:
    scale = "linear" if linear else "decades"
    title = f"Value over steps, {shown.name}"
    return Heat(title, shown.id, "gates/value", scale, diverging=False, size="medium", doc="Mean effective weight")  # type: ignore[arg-type]


def _table(ask: Ask, shown: Shown) -> Table:
    columns = ("value", "minimum", "maximum", "saturated_fraction", "gradient")
    found = [profile_at(shown, f"gates/{name}", ask.step, linear=True) for name in columns]
    first = next((profile for profile in found if profile is not None), None)
    axis = None if first is None else first.axis
    labels = () if axis is None else axis.labels
    every = [
        (label, "" if axis is None else axis.types[i], *(_number(profile, i) for profile in found))
        for i, label in enumerate(labels[:MAX_ROWS])
    ]
    alike = [list(rows) for _, rows in groupby(range(len(every)), key=lambda i: every[i][1:])]
    rows = tuple((_span([every[i][0] for i in group]), *every[group[0]][1:]) for group in alike)
    places = tuple(Place(shown.id, depth=int(first.depth[group[0]])) for group in alike) if first is not None else ()
    head = ("Gate", "Kind", "Value", "Smallest", "Largest", "Saturated", "Gradient")
    note = f"the first {MAX_ROWS} of {len(labels):,}" if len(labels) > MAX_ROWS else ""
    return Table(f"Gates of {shown.name}", head, rows, note, numeric=(2, 3, 4, 5, 6), places=places)


def _span(labels: Sequence[str]) -> str:
    """Neighbours that show the same in every column, in one row."""
    return labels[0] if len(labels) == 1 else f"{labels[0]} to {labels[-1]} ({len(labels)})"


def _number(profile: Profile | None, i: int) -> str:
    from keelscope.formatting import number

    return typeset(number(None if profile is None or np.isnan(profile.levels[i]) else float(profile.levels[i])))


PAGE = Page(
    "gates",
    "Gates",
    "gates",
    "Which gates are open, which are stuck?",
    _build,
    _choices,
    frozenset({"step"}),
)
