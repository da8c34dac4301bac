"""`Overview`: a series in fewer rows: mean, lowest and highest value of every 16 or 256 recorded rows.

Sealed files of long runs hold them ready made, see `sealedfile`; of other runs they are made from the rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "FACTORS", "LONG_RUN", "Overview", "joined", "reduced", "shrunk"]

FACTORS = (16, 256)
COLUMNS: Mapping[str, type] = {
    "first": np.int64,
    "last": np.int64,
    "mean": np.float64,
    "low": np.float64,
    "high": np.float64,
    "observed": np.bool_,
}
"""Fields of an `Overview` and their types."""
LONG_RUN = 20_000
"""Rows from which a sealed file holds overviews."""


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """Bins of consecutive recorded rows; the last one may hold fewer."""

    first: NDArray[np.int64]
    """``[bin]``: step of the first row."""
    last: NDArray[np.int64]
    """``[bin]``: step of the last row."""
    mean: NDArray[np.float64]
    """``[bin, site, ...]``: mean of the observed values; NaN where one of them is NaN, or none was observed."""
    low: NDArray[np.float64]
    """``[bin, site, ...]``: lowest observed value that is not NaN; NaN where there is none."""
    high: NDArray[np.float64]
    """``[bin, site, ...]``: highest one."""
    observed: NDArray[np.bool_]
    """``[bin, site]``: whether any row of the bin has a value."""


def shrunk(steps: NDArray[np.int64], factor: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First and last step of every bin.

    Args:
        steps: ``[step]``.
        factor: rows per bin.

    Returns:
        Both ``[bin]``.

    Example:
        >>> [side.tolist() for side in shrunk(np.arange(5), 2)]
        [[0, 2, 4], [1, 3, 4]]
    """
    starts = np.arange(0, len(steps), factor)
    return steps[starts], steps[np.minimum(starts + factor, len(steps)) - 1]


def reduced(
    steps: NDArray[np.int64], values: NDArray[np.float64], observed: NDArray[np.bool_], factor: int
) -> Overview:
    """The overview of some rows.

    Args:
        steps: ``[step]``.
        values: ``[step, site, ...]``.
        observed: ``[step, site]``.
        factor: rows per bin.

    Returns:
        Its bins.

    Example:
        >>> made = reduced(np.arange(3), np.array([[1.0], [3.0], [np.nan]]), np.ones((3, 1), bool), 2)
        >>> made.mean.ravel().tolist(), made.low.ravel().tolist(), made.high.ravel().tolist()
        ([2.0, nan], [1.0, nan], [3.0, nan])
    """
    first, last = shrunk(steps, factor)
    mask = np.broadcast_to(observed.reshape(*observed.shape, *(1 for _ in values.shape[2:])), values.shape)
    known, seen = _binned(np.where(mask, values, np.nan), factor, np.nan), _binned(mask, factor, fill=False)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # a bin without a number
        total = np.where(seen, known, 0.0).sum(axis=1)
        return Overview(
            first,
            last,
            total / np.where(seen.any(axis=1), seen.sum(axis=1), np.nan),
            np.fmin.reduce(known, axis=1),
            np.fmax.reduce(known, axis=1),
            np.asarray(_binned(observed, factor, fill=False).any(axis=1), np.bool_),
        )


def joined(pieces: list[Overview]) -> Overview:
    """Overviews of consecutive rows as one.

    Args:
        pieces: at least one.

    Returns:
        All their bins.
    """
    return Overview(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in COLUMNS))


def _binned(values: NDArray[np.generic], factor: int, fill: float) -> NDArray[np.generic]:
    """``[bin, row, ...]``, the last bin filled up."""
    lacking = -len(values) % factor
    if lacking:
        rest = np.full((lacking, *values.shape[1:]), fill, values.dtype)
        values = np.concatenate([values, rest])
    return values.reshape(-1, factor, *values.shape[1:])
