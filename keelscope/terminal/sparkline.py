"""Profiles as text: bars, one-line sparklines and small column charts of levels in decades.

Used by `keelscope.terminal`. A scale never spans less than one decade, so that a flat profile looks flat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Scale", "bar", "columns", "sparkline", "stretch"]

_UP = " ▁▂▃▄▅▆▇█"
_ACROSS = " ▏▎▍▌▋▊▉█"
_MISSING = "·"


@dataclass(frozen=True, slots=True)
class Scale:
    """The range of a drawing, in decades."""

    low: float
    high: float

    @classmethod
    def over(cls, levels: ArrayLike) -> Scale:
        """The range of the finite levels, widened around its middle to at least one decade.

        Args:
            levels: any shape; NaN is ignored.

        Returns:
            The scale; 0..1 when nothing is finite.

        Example:
            >>> Scale.over([-3.0, -3.0])
            Scale(low=-3.5, high=-2.5)
        """
        values = np.asarray(levels, dtype=np.float64)
        values = values[np.isfinite(values)]
        if values.size == 0:
            return cls(0.0, 1.0)
        low, high = float(values.min()), float(values.max())
        pad = max(0.0, 1.0 - (high - low)) / 2
        return cls(low - pad, high + pad)

    def share(self, level: float) -> float:
        """Place of a level in the range: 0 at the low end, 1 at the high end."""
        return min(1.0, max(0.0, (level - self.low) / (self.high - self.low)))


def bar(level: float, scale: Scale, width: int) -> str:
    """A horizontal bar, at least an eighth of a character for any finite level.

    Args:
        level: in decades; NaN draws nothing.
        scale: the range.
        width: characters at the high end.

    Returns:
        Exactly `width` characters.

    Example:
        >>> bar(-1.0, Scale(-2.0, 0.0), 4), bar(-2.0, Scale(-2.0, 0.0), 4)
        ('██  ', '▏   ')
    """
    if not np.isfinite(level):
        return " " * width
    eighths = max(1, round(scale.share(level) * width * 8))
    full, part = divmod(eighths, 8)
    return ("█" * full + (_ACROSS[part] if part else "")).ljust(width)


def stretch(values: ArrayLike, width: int) -> NDArray[np.float64]:
    """A profile on `width` columns: medians of neighbours when there are more layers, whole repeats when fewer.

    Args:
        values: ``[layer]``; NaN is ignored inside a column.
        width: largest number of columns.

    Returns:
        ``[column]``; NaN where a column holds nothing.

    Example:
        >>> stretch([1.0, 3.0, 5.0, 7.0], 2).tolist(), stretch([1.0, 2.0], 5).tolist()
        ([2.0, 6.0], [1.0, 1.0, 2.0, 2.0])
    """
    levels = np.asarray(values, dtype=np.float64)
    if levels.size <= width:
        return np.repeat(levels, max(1, width // max(1, levels.size)))
    parts = [part[~np.isnan(part)] for part in np.array_split(levels, width)]
    return np.array([np.median(part) if part.size else np.nan for part in parts])


def sparkline(levels: ArrayLike, width: int) -> str:
    """One line of blocks.

    Args:
        levels: ``[layer]`` in decades; NaN is a dot.
        width: largest number of characters.

    Returns:
        The line.

    Example:
        >>> sparkline([-4.0, -3.0, -2.0, -1.0], 4)
        '▁▃▆█'
    """
    return columns(levels, width, 1)[0]


def columns(levels: ArrayLike, width: int, rows: int) -> Sequence[str]:
    """A column chart, one column per layer.

    Args:
        levels: ``[layer]`` in decades; a missing layer is a dot on the bottom row.
        width: largest number of columns.
        rows: height in characters.

    Returns:
        Lines from top to bottom, all of one length.
    """
    scale, values = Scale.over(levels), stretch(levels, width)
    heights = [1 + round(scale.share(v) * (8 * rows - 1)) if np.isfinite(v) else -1 for v in values]
    lines = []
    for row in range(rows - 1, -1, -1):
        cells = [_UP[min(8, max(0, height - 8 * row))] for height in heights]
        if row == 0:
            cells = [_MISSING if height < 0 else cell for height, cell in zip(heights, cells, strict=True)]
        lines.append("".join(cells))
    return lines
