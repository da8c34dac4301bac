"""`Pool`: levels reduced to a bounded number of step bins, extremes kept, fed row by row while a run is written.

A bin keeps for each layer the level that is farthest from its reference, and a zero, NaN or Inf of any of its rows
wins over every value: one bad cell among thousands stays visible. Pooling a run in pieces gives what pooling it at
once gives, so the server reads only new rows of a live run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from keelscope_dashboards.levels import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope_dashboards.levels import Levels

__all__ = ["Band", "Pool", "Tile", "band", "envelope", "pool"]


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Pooled levels, ready to be sent."""

    first: NDArray[np.int64]
    """``[bin]``: first step of each bin."""
    last: NDArray[np.int64]
    """``[bin]``: last step of each bin."""
    reference: NDArray[np.float32]
    """``[bin]``: reference level at the last step of the bin."""
    deviations: NDArray[np.float32]
    """``[bin, layer]``: decades from the reference, the farthest of the bin."""
    kinds: NDArray[np.uint8]
    """``[bin, layer]`` of `keelscope_dashboards.levels.Kind`, the most severe of the bin."""
    rows: int
    """Recorded rows per bin; the last bin may hold fewer."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (self.first, self.last, self.reference, self.deviations, self.kinds)
        return sum(array.nbytes for array in arrays)

    def of(self, layer: int) -> Tile:
        """One layer alone.

        Args:
            layer: its index.

        Returns:
            A view with one layer.
        """
        at = slice(layer, layer + 1)
        return Tile(self.first, self.last, self.reference, self.deviations[:, at], self.kinds[:, at], self.rows)

    def since(self, start: int) -> Tile:
        """The bins from index `start` on.

        Args:
            start: index of the first bin wanted.

        Returns:
            A view on the last bins.
        """
        tail = slice(start, None)
        return Tile(
            self.first[tail], self.last[tail], self.reference[tail], self.deviations[tail], self.kinds[tail], self.rows
        )


def pool(levels: Levels, rows: int) -> Tile:
    """Reduce every `rows` consecutive rows to one bin.

    Args:
        levels: ``[step, layer]``.
        rows: recorded rows per bin, at least 1.

    Returns:
        A tile with ``ceil(step / rows)`` bins.
    """
    return _merged(_unpooled(levels), np.arange(0, len(levels.steps), rows), rows)


@dataclass(frozen=True, slots=True, eq=False)
class Band:
    """One layer over step bins, in absolute decades."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    low: NDArray[np.float32]
    """``[bin]``: lowest level; NaN where no row holds a value."""
    high: NDArray[np.float32]
    """``[bin]``: highest level; NaN where no row holds a value."""
    kinds: NDArray[np.uint8]
    """``[bin]`` of `keelscope_dashboards.levels.Kind`, the most severe of the bin."""


def band(levels: Levels, rows: int) -> Band:
    """Reduce one layer to the range it spans in every `rows` consecutive rows.

    Args:
        levels: ``[step, 1]``.
        rows: recorded rows per bin, at least 1.

    Returns:
        A band with ``ceil(step / rows)`` bins.
    """
    starts = np.arange(0, len(levels.steps), rows)
    if len(starts) == 0:
        none = np.empty(0, dtype=np.float32)
        return Band(levels.steps, levels.steps, none, none, np.empty(0, dtype=np.uint8))
    known = np.where(levels.kinds == Kind.VALUE, levels.decades, np.float32(np.nan))[:, 0]
    ends = np.append(starts[1:], len(levels.steps)) - 1
    return Band(
        levels.steps[starts],
        levels.steps[ends],
        np.fmin.reduceat(known, starts),
        np.fmax.reduceat(known, starts),
        np.maximum.reduceat(levels.kinds[:, 0], starts),
    )


def envelope(
    values: NDArray[np.float64], limit: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """The lowest and the highest value of at most `limit` bins.

    Args:
        values: ``[row]``; NaN takes no part unless a bin holds nothing else.
        limit: most bins wanted.

    Returns:
        First row, lowest and highest value of every bin.

    Example:
        >>> [column.tolist() for column in envelope(np.array([3.0, 1.0, np.nan, 9.0, 2.0]), 3)]
        [[0, 2, 4], [1.0, 9.0, 2.0], [3.0, 9.0, 2.0]]
    """
    starts = np.arange(0, len(values), max(1, -(-len(values) // limit)))
    return starts, np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)


def _unpooled(levels: Levels) -> Tile:
    return Tile(levels.steps, levels.steps, levels.reference, levels.deviations, levels.kinds, 1)


def _merged(tile: Tile, starts: NDArray[np.int64], rows: int) -> Tile:
    """Join the bins between consecutive `starts` into one each."""
    if len(starts) == len(tile):
        return Tile(tile.first, tile.last, tile.reference, tile.deviations, tile.kinds, rows)
    ends = np.append(starts[1:], len(tile)) - 1
    high = np.maximum.reduceat(tile.deviations, starts, axis=0)
    low = np.minimum.reduceat(tile.deviations, starts, axis=0)
    return Tile(
        tile.first[starts],
        tile.last[ends],
        tile.reference[ends],
        np.where(high >= -low, high, low),
        np.maximum.reduceat(tile.kinds, starts, axis=0),
        rows,
    )


def _joined(left: Tile, right: Tile) -> Tile:
    return Tile(
        np.concatenate([left.first, right.first]),
        np.concatenate([left.last, right.last]),
        np.concatenate([left.reference, right.reference]),
        np.concatenate([left.deviations, right.deviations]),
        np.concatenate([left.kinds, right.kinds]),
        left.rows,
    )


class Pool:
    """A tile that grows with its run and halves its resolution when it holds too many bins.

    Args:
        layers: length of the layer axis.
        limit: most bins kept.
    """

    def __init__(self, layers: int, limit: int) -> None:
        self._limit = max(1, limit)
        self._seen = 0
        steps, reference = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        deviations, kinds = np.empty((0, layers), dtype=np.float32), np.empty((0, layers), dtype=np.uint8)
        self._tile = Tile(steps, steps, reference, deviations, kinds, 1)

    @property
    def seen(self) -> int:
        """Rows taken in so far."""
        return self._seen

    @property
    def tile(self) -> Tile:
        """Everything seen so far; the last bin may still be filling."""
        return self._tile

    def extend(self, levels: Levels) -> None:
        """Take in the rows that follow those already seen.

        Args:
            levels: ``[step, layer]`` of the new rows.
        """
        count = len(levels.steps)
        if count == 0:
            return
        rows = self._tile.rows
        while -(-(self._seen + count) // rows) > self._limit:
            rows *= 2
        old = np.arange(len(self._tile)) * self._tile.rows // rows
        new = (self._seen + np.arange(count)) // rows
        starts = np.flatnonzero(np.diff(np.concatenate([old, new]), prepend=-1))
        self._tile = _merged(_joined(self._tile, _unpooled(levels)), starts, rows)
        self._seen += count
