"""`Pool`: levels reduced to a bounded number of step bins, extremes kept, fed row by row while a run is written.

A bin keeps for each layer the level that is farthest from its reference, and a zero, NaN or Inf of any of its rows
wins over every value: one bad cell among thousands stays visible. Pooling a run in pieces gives what pooling it at
once gives, so the server reads only new rows of a live run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        return self._part(slice(start, None))

    def until(self, stop: int) -> Tile:
        """The bins before index `stop`.

        Args:
            stop: index of the first bin that is left out.

        Returns:
            A view on the first bins.
        """
        return self._part(slice(stop))

    def _part(self, at: slice) -> Tile:
        return Tile(self.first[at], self.last[at], self.reference[at], self.deviations[at], self.kinds[at], self.rows)


def _reduced(ufunc: np.ufunc, values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[Any]:
    """``ufunc.reduceat`` along the first axis; bins of one length are many times faster reduced together."""
    sizes = np.diff(starts)[1:]
    if not sizes.size or (sizes != sizes[0]).any():
        return np.asarray(ufunc.reduceat(values, starts, axis=0))
    first, last = starts[1], starts[-1]
    middle = values[first:last].reshape(-1, sizes[0], *values.shape[1:])
    ends = (ufunc.reduce(values[:first], axis=0)[None], ufunc.reduce(values[last:], axis=0)[None])
    return np.concatenate([ends[0], ufunc.reduce(middle, axis=1), ends[1]])


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
    high = _reduced(np.maximum, tile.deviations, starts)
    low = _reduced(np.minimum, tile.deviations, starts)
    return Tile(
        tile.first[starts],
        tile.last[ends],
        tile.reference[ends],
        np.where(high >= -low, high, low),
        _reduced(np.maximum, tile.kinds, starts),
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
    def limit(self) -> int:
        """Most bins kept."""
        return self._limit

    @property
    def seen(self) -> int:
        """Rows taken in so far."""
        return self._seen

    @property
    def tile(self) -> Tile:
        """Everything seen so far; the last bin may still be filling."""
        return self._tile

    def begin(self, tile: Tile, seen: int) -> None:
        """Start from rows that were pooled before, as far as they are not finer than this pool keeps them.

        Args:
            tile: the first rows of the run.
            seen: how many rows those are.
        """
        rows = tile.rows
        while -(-seen // rows) > self._limit:
            rows *= 2
        self._tile = _merged(tile, np.arange(0, len(tile), rows // tile.rows), rows)
        self._seen = seen

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
        ratio = rows // self._tile.rows
        old = _merged(self._tile, np.arange(0, len(self._tile), ratio), rows)
        filled = self._seen % rows  # rows in the last bin, which is open unless there are none
        kept = len(old) - 1 if filled else len(old)
        fresh = _joined(old.since(kept), _unpooled(levels))
        first = rows - filled + 1 if filled else rows
        starts = np.concatenate([[0], np.arange(first, len(fresh), rows)])
        self._tile = _joined(old.until(kept), _merged(fresh, starts, rows))
        self._seen += count
