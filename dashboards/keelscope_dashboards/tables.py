"""`tile_csv`: what a heatmap shows as a table for spreadsheets: one row per bin of steps, one column per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keelscope_dashboards.levels import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from keelscope_dashboards.levels import LayerAxis
    from keelscope_dashboards.panels import Panel
    from keelscope_dashboards.pooling import Tile

__all__ = ["tile_csv"]

DIGITS = 6  # a tile holds log10 in float32


def tile_csv(tile: Tile, axis: LayerAxis, panel: Panel, run: str) -> Iterator[str]:
    """The values themselves, not their logarithms.

    Args:
        tile: of a panel.
        axis: its layers.
        panel: what was drawn.
        run: name of the run.

    Yields:
        Lines of CSV, after comments that begin with ``#``.
    """
    yield f"# {_plain(panel.key)} of {_plain(run)}\n"
    if tile.rows > 1:
        yield f"# each row holds the value farthest from the reference of {tile.rows} recorded steps\n"
    depths = axis.depths or range(1, len(axis) + 1)
    names = (f"{axis.unit} {depth}: {label}" for depth, label in zip(depths, axis.labels, strict=True))
    yield ",".join(["first_step", "last_step", *(_quoted(name) for name in names)]) + "\n"
    for i in range(len(tile)):
        cells = _values(tile, i, linear=panel.scale == "linear")
        yield f"{tile.first[i]},{tile.last[i]},{','.join(cells)}\n"


def _values(tile: Tile, i: int, *, linear: bool) -> list[str]:
    levels: NDArray[np.float64] = tile.deviations[i].astype(np.float64) + float(tile.reference[i])
    values = levels if linear else 10.0**levels
    words = {Kind.ZERO: "0", Kind.NAN: "nan", Kind.INF: "inf", Kind.ABSENT: ""}
    pairs = zip(values.tolist(), tile.kinds[i].tolist(), strict=True)
    return [words[Kind(kind)] if kind != Kind.VALUE else f"{value:.{DIGITS}g}" for value, kind in pairs]


def _plain(text: str) -> str:
    return " ".join(text.split())


def _quoted(text: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    safe = f"'{text}" if text[:1] in "=+-@" else text
    return '"' + safe.replace('"', '""') + '"' if any(sign in safe for sign in ',"\n\r') else safe
