"""The causes of a gradient's change as steps of a waterfall, and the waterfall as SVG for pages without scripts.

`figures.waterfall` draws the same steps with Plotly. Decades, from the output end of the stack to the input end.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from keelscope.diagnosis.explanation import CAUSE_TITLES
from keelscope.formatting import decades

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope.analysis.attribution import Attribution

__all__ = ["Step", "extent", "steps_of", "waterfall_svg"]

_SMALLEST = 0.005  # decades below which a cause is left out
_SPAN = 1.0  # decades that an axis shows at least
_LABEL, _PLOT, _NUMBER, _ROW = 250, 360, 70, 26  # of the drawing, in its own units
_HEAD = 22


@dataclass(frozen=True, slots=True)
class Step:
    """One bar of the waterfall."""

    title: str
    decades: float
    start: float
    """Level before it, in decades against the output end."""
    is_total: bool = False

    @property
    def end(self) -> float:
        """Level after it."""
        return self.start + self.decades


def steps_of(attribution: Attribution) -> tuple[Step, ...]:
    """The bars from the output end to the input end, the total last.

    Args:
        attribution: of one residual stream.

    Returns:
        One step per cause that changes anything; empty if nothing is known.
    """
    if attribution.largest is None:
        return ()
    steps, level = [], 0.0
    for cause in attribution.causes:
        if abs(cause.decades) >= _SMALLEST:
            title = CAUSE_TITLES[cause.name]
            steps.append(Step(f"{title[0].upper()}{title[1:]}", cause.decades, level))
        level += cause.decades
    return (*steps, Step("Total, from output to input", attribution.total, 0.0, is_total=True))


def extent(steps: Sequence[Step]) -> tuple[float, float]:
    """The range of an axis that holds every bar: a decade at least, so that what is level looks level.

    Args:
        steps: the bars.

    Returns:
        Lowest and highest level, 0 inside.
    """
    levels = [0.0, *(step.end for step in steps)]
    low, high = min(levels), max(levels)
    spare = max(0.0, _SPAN - (high - low)) / 2
    return low - spare, high + spare


def waterfall_svg(attribution: Attribution) -> str:
    """The waterfall as one SVG element, coloured by the classes ``lost``, ``gained`` and ``total``.

    Args:
        attribution: of one residual stream.

    Returns:
        The element; empty text if nothing is known.
    """
    steps = steps_of(attribution)
    if not steps:
        return ""
    low, high = extent(steps)
    scale = _PLOT / (high - low)
    zero = _LABEL + _NUMBER - low * scale
    height = _HEAD + _ROW * len(steps) + 8
    spoken = "; ".join(f"{step.title}: {decades(round(step.decades, 9))} decades" for step in steps)
    rows = "".join(_row(step, i, zero, scale) for i, step in enumerate(steps))
    return (
        f'<svg class="waterfall" viewBox="0 0 {_LABEL + _PLOT + 2 * _NUMBER} {height}" role="img" '
        f'aria-label="{escape(spoken)}"><text class="soft" x="{zero:.1f}" y="12" text-anchor="middle">output end</text>'
        f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="{_HEAD - 4}" y2="{height - 4}"/>{rows}</svg>'
    )


def _row(step: Step, index: int, zero: float, scale: float) -> str:
    """Name, bar, number, and the line that leads to the next bar."""
    top = _HEAD + _ROW * index
    left = zero + min(step.start, step.end) * scale
    width = max(abs(step.decades) * scale, 1.0)
    kind = "total" if step.is_total else "lost" if step.decades < 0 else "gained"
    after = step.decades >= 0
    at = left + width + 6 if after else left - 6
    middle = top + _ROW / 2 + 2
    end = zero + step.end * scale
    link = f'<line x1="{end:.1f}" x2="{end:.1f}" y1="{top + 6}" y2="{top + _ROW + 6}"/>'
    return (
        f'<text x="0" y="{middle + 4:.0f}">{escape(step.title)}</text>{"" if step.is_total else link}'
        f'<rect class="{kind}" x="{left:.1f}" y="{top + 6}" width="{width:.1f}" height="{_ROW - 9}"/>'
        f'<text x="{at:.1f}" y="{middle + 4:.0f}" text-anchor="{"start" if after else "end"}">'
        f"{step.decades:+.2f}</text>"
    )
