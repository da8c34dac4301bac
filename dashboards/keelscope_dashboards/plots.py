"""The pictures of an HTML report: gradient over depth, layer x step, loss and gradient norm over steps.

Called by `document.render`; `drawing` and `tiles` draw. A picture that a run holds nothing for is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.evidence import LATE_TOKENS, OUTPUT_GRADIENT
from keelscope.formatting import count, decades
from keelscope_dashboards.bands import spans_of
from keelscope_dashboards.depth import run_axis
from keelscope_dashboards.drawing import Chart, Curve, chart_svg
from keelscope_dashboards.levels import levels_of
from keelscope_dashboards.tiles import heatmap_svg

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope.diagnosis import Report

__all__ = ["plots_section"]

_SCALARS = (("loss", "Loss", False), ("grad_norm_total", "Gradient norm of all parameters", True))
_SHORTCUT = "shortcuts alone"


def plots_section(report: Report) -> str:
    """The figures of a report, those first that the verdict rests on.

    Args:
        report: any report.

    Returns:
        HTML text; empty where nothing can be drawn.
    """
    figures = [_over_depth(report), _over_steps(report), *_curves(report)]
    drawn = "".join(figure for figure in figures if figure)
    return f'<section class="plots"><h2>Gradient</h2>{drawn}</section>' if drawn else ""


def _figure(svg: str, title: str, caption: str, kind: str = "") -> str:
    if not svg:
        return ""
    shown = f' class="{kind}"' if kind else ""
    head = f'<figure{shown}><h3>{title}</h3><div class="wide" tabindex="0">{svg}</div>'
    return f"{head}<figcaption>{caption}</figcaption></figure>"


def _over_depth(report: Report) -> str:
    """Whole tensor, late tokens and shortcuts, each against its own value at the output end."""
    profiles = (_profile(report, key, colour) for colour, key in enumerate(_profile_keys(report)))
    curves = [curve for curve in profiles if curve is not None]
    shortcut = _shortcut_curve(report)
    curves += [shortcut] if shortcut is not None else []
    axis = report.axis
    where = f" of the stack {axis.stack.path}" if axis.stack is not None and axis.stack.path != "." else ""
    chart = Chart(
        f"depth in {axis.unit}s{where} (1 = input)",
        f"Gradient over depth: {'; '.join(curve.name for curve in curves)}.",
        x_range=(0.0, axis.length),
        bands=spans_of(report.run),
    )
    caption = "Each line against its own value at the output end of the stack; the axis is logarithmic. "
    caption += "A line that falls to the left shows a gradient that vanishes on its way to the input."
    if shortcut is not None:
        caption += " Shortcuts alone: what would arrive if every branch were cut."
    return _figure(chart_svg(curves, chart), "Over depth", caption)


def _profile_keys(report: Report) -> list[str]:
    """The output-gradient profiles; that of parameters where outputs were not watched."""
    keys = [key for key in report.profiles if key.startswith("gradients/")]
    return keys or list(report.profiles)[:1]


def _profile(report: Report, key: str, colour: int) -> Curve | None:
    profile = report.profiles[key]
    levels = profile.shape.levels
    usable = np.flatnonzero(np.isfinite(levels))
    if not usable.size:
        return None
    name = {OUTPUT_GRADIENT: "whole tensor", LATE_TOKENS: "late tokens"}.get(key, profile.title)
    slope = f", S {decades(profile.shape.total)}" if np.isfinite(profile.shape.total) else ""
    return Curve(f"{name}{slope}", report.axis.depth, levels - levels[usable[-1]], colour)


def _shortcut_curve(report: Report) -> Curve | None:
    """What shortcuts alone leave, where the main stream is the whole axis; the value enters each sub-layer."""
    stream = report.paths.main if report.paths is not None else None
    if stream is None or len(stream) != report.axis.length:
        return None
    carried = np.append(stream.shortcut.carried, 0.0)
    if not np.isfinite(carried[:-1]).any():
        return None
    finite = np.where(np.isfinite(carried), carried, np.nan)
    return Curve(f"{_SHORTCUT}, {decades(float(carried[0]))}", np.arange(carried.size, dtype=np.float64), finite, 2)


def _over_steps(report: Report) -> str:
    """The heatmap of the series that decided, if it is one of the output gradient."""
    decided = report.verdict.decided_by
    key = decided if decided.startswith("gradients/") else OUTPUT_GRADIENT
    if key not in report.run:
        return ""
    series = report.run[key]
    axis = run_axis(report.run, key.partition("/")[0])
    svg = heatmap_svg(levels_of(series, axis, reference="output"), axis, against="the output side")
    title = "late-token level" if key == LATE_TOKENS else "whole tensor"
    caption = (
        f"Output gradient ({title}) of every layer, {count(len(series.steps), 'recorded step')}, in decades against "
    )
    caption += "the layers at the output side at the same step. Blue is smaller, brown is larger."
    return _figure(svg, "Layer by step", caption)


def _curves(report: Report) -> list[str]:
    found = []
    for name, title, logarithmic in _SCALARS:
        key = f"scalars/{name}"
        series = report.run[key] if name in report.run.scalars and key in report.run else None
        if series is None or np.isfinite(series.values).sum() < 2:
            continue
        values = np.asarray(series.values, dtype=np.float64)
        known = values[np.isfinite(values)]
        chart = Chart(
            "step",
            f"{title}: {known[0]:.3g} at first, {known[-1]:.3g} at last.",
            decades=logarithmic,
            named=False,
            width=380,
        )
        curve = Curve(title, np.asarray(series.steps, dtype=np.float64), _log(values) if logarithmic else values, 0)
        found.append(
            _figure(chart_svg([curve], chart), title, f"{known[0]:.3g} at first, {known[-1]:.3g} at last.", "half")
        )
    return found


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log10(values, out=np.full(values.shape, np.nan), where=values > 0)
