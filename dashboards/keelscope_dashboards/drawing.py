"""Line charts as SVG for pages without scripts: curves, log or linear axis, bands, legend; coloured by CSS classes.

Used by `plots`. Curves differ by colour and by dash, so that a page printed in grey can be read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from keelscope_dashboards.blocks import Span

__all__ = ["Chart", "Curve", "chart_svg", "round_ticks"]

_LEFT, _RIGHT, _BOTTOM = 52, 14, 40
_LEGEND, _BANDS = 22, 18
_LETTER = 6.4  # width of a letter at 12 units
_LEAST = 1.0  # decades, so that what is level looks level
_POINTS = 1000
_FINE = 2.0  # decades


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """One line."""

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    """NaN leaves a gap."""
    colour: int = 0
    """Index into `Palette.runs`; also decides the dash."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn beside the curves."""

    x_title: str
    spoken: str
    """What the picture shows, for those who cannot see it."""
    x_range: tuple[float, float] | None = None
    decades: bool = True
    """Whether y is log10 of the quantity; else y is the quantity."""
    named: bool = True
    """Whether a legend says which line is which."""
    bands: tuple[Span, ...] = field(default=())
    width: int = 760
    height: int = 300


def chart_svg(curves: Sequence[Curve], chart: Chart) -> str:
    """The chart as one SVG element.

    Args:
        curves: at least one with a finite point.
        chart: axes and size.

    Returns:
        The element; empty text if there is nothing to draw.
    """
    known = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not known:
        return ""
    top = (_LEGEND if chart.named else 8) + (_BANDS if chart.bands else 0)
    box = (_LEFT, top, chart.width - _RIGHT, chart.height - _BOTTOM)
    x_low, x_high = chart.x_range or _range(np.concatenate([curve.x for curve in known]), 0.0)
    y_low, y_high = _range(np.concatenate([curve.y for curve in known]), _LEAST if chart.decades else 0.0)
    spare = 0.06 * (y_high - y_low) or max(abs(y_high), 1.0) * 0.05
    place = _Place(box, (x_low, x_high), (y_low - spare, y_high + spare))
    parts = [_bands(chart.bands, place), _y_axis(place, decades=chart.decades), _x_axis(place, chart.x_title)]
    parts += [_line(curve, place) for curve in known]
    parts += [_legend(known)] if chart.named else []
    return (
        f'<svg class="chart" viewBox="0 0 {chart.width} {chart.height}" role="img" '
        f'aria-label="{escape(chart.spoken)}">{"".join(parts)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """From data to the drawing."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom."""
    x_range: tuple[float, float]
    y_range: tuple[float, float]

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.box[0] + (value - low) / ((high - low) or 1.0) * (self.box[2] - self.box[0])

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.box[3] - (value - low) / ((high - low) or 1.0) * (self.box[3] - self.box[1])


def _range(values: NDArray[np.float64], least: float) -> tuple[float, float]:
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    pad = max(0.0, least - (high - low)) / 2
    return low - pad, high + pad


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers inside a range: multiples of 1, 2 or 5 times a power of ten.

    Args:
        low: lower end.
        high: upper end.
        most: largest number of them.

    Returns:
        Increasing values.

    Example:
        >>> round_ticks(0, 64, 7), round_ticks(-0.2, 0.3, 4)
        ([0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0], [-0.2, 0.0, 0.2])
    """
    span = max(high - low, 1e-300)
    unit = float(10.0 ** np.floor(np.log10(span / most)))
    step = next(unit * m for m in (1, 2, 5, 10, 20) if span / (unit * m) <= most)
    first, last = int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9))
    return [round(k * step, 12) for k in range(first, last + 1)]


def _y_axis(place: _Place, *, decades: bool) -> str:
    low, high = place.y_range
    left, _, right, _ = place.box
    out = []
    for tick in _decade_ticks(low, high) if decades else round_ticks(low, high, 6):
        at = place.y(tick)
        out.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        text = _power(tick) if decades else f"{tick:g}"
        out.append(f'<text class="soft" x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    return "".join(out)


def _decade_ticks(low: float, high: float) -> list[float]:
    """Whole decades; 1, 2 and 5 times them where the axis spans less than two."""
    if high - low >= _FINE:
        return [t for t in round_ticks(low, high, 6) if t == round(t)]
    whole = range(int(np.floor(low)), int(np.ceil(high)) + 1)
    fine = [k + float(np.log10(m)) for k in whole for m in (1, 2, 5)]
    return [t for t in fine if low <= t <= high]


def _power(tick: float) -> str:
    """Ten to that power: as a power if it is a whole one other than 0, else as a number."""
    if tick != round(tick) or tick == 0:
        return f"{10.0**tick:.3g}"
    return f'10<tspan dy="-5" font-size="9">{tick:.0f}</tspan>'


def _x_axis(place: _Place, title: str) -> str:
    left, _, right, bottom = place.box
    out = [f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>']
    ticks = round_ticks(*place.x_range, 10)
    for tick in (t for t in ticks if t == round(t)):
        at = place.x(tick)
        out.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        out.append(f'<text class="soft" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:,.0f}</text>')
    middle = (left + right) / 2
    out.append(f'<text class="soft" x="{middle:.0f}" y="{bottom + 31}" text-anchor="middle">{escape(title)}</text>')
    return "".join(out)


def _bands(bands: Sequence[Span], place: _Place) -> str:
    """Every other stretch shaded, with its name above where there is room."""
    out = []
    _, top, _, bottom = place.box
    for i, band in enumerate(bands):
        left, right = (place.x(min(max(end, place.x_range[0]), place.x_range[1])) for end in (band.start, band.end))
        shade = "even" if i % 2 else "odd"
        size = f'x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{bottom - top}"'
        out.append(f'<rect class="band {shade}" {size}><title>{escape(band.label)}</title></rect>')
        if _LETTER * len(band.label) <= right - left:
            at = (left + right) / 2
            out.append(
                f'<text class="soft" x="{at:.1f}" y="{top - 5}" text-anchor="middle">{escape(band.label)}</text>'
            )
    return "".join(out)


def _line(curve: Curve, place: _Place) -> str:
    every = max(1, -(-curve.x.size // _POINTS))
    path, pen_down = [], False
    for x, y in zip(curve.x[::every], curve.y[::every], strict=True):
        if np.isfinite(y):
            path.append(f"{'L' if pen_down else 'M'}{place.x(x):.1f} {place.y(y):.1f}")
        pen_down = bool(np.isfinite(y))
    dots = "".join(
        f'<circle class="dot{curve.colour}" cx="{place.x(curve.x[i]):.1f}" cy="{place.y(curve.y[i]):.1f}" r="2.5"/>'
        for i in _lonely(curve.y)
    )
    return f'<path class="run{curve.colour}" d="{"".join(path)}"/>{dots}'


def _lonely(y: NDArray[np.float64]) -> list[int]:
    """Points without a neighbour, of which no line could be seen."""
    finite = np.concatenate([[False], np.isfinite(y), [False]])
    return [int(i) for i in np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])]


def _legend(curves: Sequence[Curve]) -> str:
    out, at = [], float(_LEFT)
    for curve in curves:
        out.append(f'<path class="run{curve.colour}" d="M{at:.0f} 10H{at + 26:.0f}"/>')
        out.append(f'<text x="{at + 32:.0f}" y="14">{escape(curve.name)}</text>')
        at += 32 + _LETTER * len(curve.name) + 18
    return "".join(out)
