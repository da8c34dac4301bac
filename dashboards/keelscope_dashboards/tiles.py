"""The layer x step heatmap as SVG for pages without scripts: one path per colour, whose colours CSS decides.

A cell shows the farthest level of the rows and layers that it stands for, as in `pooling`.
"""

from __future__ import annotations

from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from keelscope_dashboards.drawing import round_ticks
from keelscope_dashboards.levels import Kind
from keelscope_dashboards.pooling import Tile, pool
from keelscope_dashboards.theme import MARKS, SHADES, TICKS, symlog

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope_dashboards.levels import LayerAxis, Levels

__all__ = ["heatmap_svg", "shades_of"]

_LEFT, _TOP, _BOTTOM, _WIDTH = 52, 8, 78, 694
_COLUMNS, _ROWS = 160, 128  # bounds the page: 20,000 cells at most
_LOWEST, _HIGHEST = 3.0, 16.0  # height of a row
_TALLEST = 384.0
_LABELS = 8
_MARKED = 3  # classes after the shades: exactly 0, NaN, Inf


def heatmap_svg(levels: Levels, axis: LayerAxis, *, against: str) -> str:
    """The heatmap as one SVG element.

    Args:
        levels: ``[step, layer]``.
        axis: the layers.
        against: what levels are compared with, in words.

    Returns:
        The element; empty text for less than two recorded steps.
    """
    if len(levels.steps) < 2 or not len(axis):
        return ""
    tile = pool(levels, -(-len(levels.steps) // _COLUMNS))
    codes = _fewer_layers(shades_of(tile).T, max(1, -(-len(axis) // _ROWS)))  # [row, column], input side first
    rows, columns = codes.shape
    size = float(np.clip(_TALLEST / rows, _LOWEST, _HIGHEST))
    height = size * rows
    body = f'<g transform="translate({_LEFT} {_TOP}) scale({_WIDTH / columns:.5f} {size:.5f})">{_paths(codes)}</g>'
    frame = f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{height:.1f}"/>'
    spoken = f"Heatmap of {len(axis)} layers over {len(levels.steps)} recorded steps, decades against {against}."
    labels = _layer_labels(len(axis), height) + _step_labels(tile, height) + _key(codes, height, against)
    return (
        f'<svg class="chart tiles" viewBox="0 0 {_LEFT + _WIDTH + 14} {height + _TOP + _BOTTOM:.0f}" role="img" '
        f'aria-label="{escape(spoken)}">{body}{frame}{labels}</svg>'
    )


def shades_of(tile: Tile) -> NDArray[np.int64]:
    """Which colour class every cell has.

    Args:
        tile: pooled levels.

    Returns:
        ``[bin, layer]``: 0 to ``SHADES - 1`` from the lowest to the highest level, then exactly 0, NaN and Inf; -1 for
        not observed.
    """
    place = np.rint((symlog(tile.deviations) + 1) / 2 * (SHADES - 1)).astype(np.int64)
    kinds = tile.kinds.astype(np.int64)
    marked = SHADES + kinds - Kind.ZERO
    return np.asarray(np.where(kinds == Kind.VALUE, place, np.where(kinds == Kind.ABSENT, -1, marked)))


def _fewer_layers(codes: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """Joins neighbouring layers: a mark wins, then what is farthest from the middle colour."""
    if group == 1:
        return codes
    middle = SHADES // 2
    rank = np.where(codes >= SHADES, codes + SHADES, np.where(codes < 0, -1, np.abs(codes - middle)))
    starts = range(0, len(codes), group)
    picks = [at + rank[at : at + group].argmax(axis=0) for at in starts]
    return np.stack([codes[pick, np.arange(codes.shape[1])] for pick in picks])


def _paths(codes: NDArray[np.int64]) -> str:
    """One path per colour; like neighbours along the steps are one rectangle, the input side at the bottom."""
    strokes: dict[int, list[str]] = {}
    for row, line in enumerate(codes[::-1].tolist()):
        column = 0
        for code, members in groupby(line):
            width = len(list(members))
            if code >= 0:
                strokes.setdefault(code, []).append(f"M{column} {row}h{width}v1h-{width}z")
            column += width
    return "".join(f'<path class="k{code}" d="{"".join(parts)}"/>' for code, parts in sorted(strokes.items()))


def _layer_labels(layers: int, height: float) -> str:
    """Numbers of some layers, 1 at the bottom."""
    shown = sorted({1, layers, *(round(layers * q / 4) for q in (1, 2, 3))} - {0})
    out = []
    for layer in shown:
        at = _TOP + height * (1 - (layer - 0.5) / layers)
        out.append(f'<text class="soft" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{layer}</text>')
    return "".join(out) if height > 12 * len(shown) else out[0] + out[-1]


def _step_labels(tile: Tile, height: float) -> str:
    """Round steps under the columns that hold them."""
    bottom, columns = _TOP + height, len(tile)
    ticks = [t for t in round_ticks(float(tile.first[0]), float(tile.last[-1]), _LABELS) if t == round(t)]
    out = []
    for tick in ticks or [float(tile.first[0])]:
        column = min(int(np.searchsorted(tile.last, tick)), columns - 1)
        at = _LEFT + (column + 0.5) * _WIDTH / columns
        out.append(f'<text class="soft" x="{at:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{tick:,.0f}</text>')
    middle = _LEFT + _WIDTH / 2
    title = (
        f'<text class="soft" x="{middle:.0f}" y="{bottom + 30:.1f}" text-anchor="middle">step; layer 1 = input</text>'
    )
    return "".join(out) + title


def _key(codes: NDArray[np.int64], height: float, against: str) -> str:
    """The colour bar, and what cells without a level hold."""
    top, width = _TOP + height + 42, 264
    step = width / SHADES
    bar = "".join(
        f'<rect class="k{i}" x="{_LEFT + i * step:.2f}" y="{top:.1f}" width="{step + 0.3:.2f}" height="9"/>'
        for i in range(SHADES)
    )
    ticks = ""
    for tick, place in zip(TICKS, symlog(np.array(TICKS, dtype=np.float64)), strict=True):
        at = _LEFT + (place + 1) / 2 * width
        ticks += f'<text class="soft" x="{at:.1f}" y="{top + 22:.1f}" text-anchor="middle">{tick:+d}</text>'.replace(
            "+0<", "0<"
        )
    said = f'<text class="soft" x="{_LEFT + width + 16}" y="{top + 9:.1f}">decades against {escape(against)}</text>'
    return bar + ticks + said + _marks(codes, top)


def _marks(codes: NDArray[np.int64], top: float) -> str:
    out, at = "", float(_LEFT + 284)
    for i, (name, _) in enumerate(MARKS[:_MARKED]):
        if (codes == SHADES + i).any():
            out += f'<rect class="k{SHADES + i}" x="{at:.0f}" y="{top + 14:.1f}" width="9" height="9"/>'
            out += f'<text class="soft" x="{at + 14:.0f}" y="{top + 22:.1f}">{name}</text>'
            at += 90
    return out
