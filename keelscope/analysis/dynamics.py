"""How a series develops over steps: first, last and median value per site, and where non-finite values begin.

Arrays in, arrays out; used by `keelscope.diagnosis` for the recent window and for the non-finite rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Course", "course", "median_over_steps", "onset"]


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """First, last and median observed value of every site."""

    first: NDArray[np.float64]
    """``[site]``; NaN where the site was never observed."""
    last: NDArray[np.float64]
    """``[site]``."""
    median: NDArray[np.float64]
    """``[site]``."""


def course(values: ArrayLike) -> Course:
    """First, last and median over steps, step by step missing values left out.

    Args:
        values: ``[step, site]``, NaN where not observed.

    Returns:
        Three arrays ``[site]``.

    Example:
        >>> c = course([[np.nan, 4.0], [1.0, 5.0], [3.0, np.nan]])
        >>> c.first.tolist(), c.last.tolist(), c.median.tolist()
        ([1.0, 4.0], [3.0, 5.0], [2.0, 4.5])
    """
    table = np.asarray(values, dtype=np.float64)
    if table.shape[0] == 0:
        empty = np.full(table.shape[1:], np.nan)
        return Course(empty, empty, empty)
    seen = ~np.isnan(table)
    some = seen.any(axis=0)
    columns = np.arange(table.shape[1])
    first = np.where(some, table[seen.argmax(axis=0), columns], np.nan)
    last = np.where(some, table[len(table) - 1 - seen[::-1].argmax(axis=0), columns], np.nan)
    return Course(first, last, median_over_steps(table))


def median_over_steps(values: ArrayLike) -> NDArray[np.float64]:
    """Median over steps of what was observed.

    Args:
        values: ``[step, site]``, NaN where not observed.

    Returns:
        ``[site]``; NaN where a site was never observed.
    """
    table = np.asarray(values, dtype=np.float64)
    out = np.full(table.shape[1:], np.nan)
    some = (~np.isnan(table)).any(axis=0)
    with np.errstate(invalid="ignore"):  # Inf - Inf inside the interpolation of an even count
        out[some] = np.nanmedian(table[:, some], axis=0)
    return out


def onset(flags: ArrayLike) -> NDArray[np.int64]:
    """The first step index at which each site is flagged.

    Args:
        flags: ``[step, site]`` booleans.

    Returns:
        ``[site]``; -1 where never.

    Example:
        >>> onset([[False, False], [True, False]]).tolist()
        [1, -1]
    """
    table = np.asarray(flags, dtype=bool)
    if table.shape[0] == 0:
        return np.full(table.shape[1:], -1, dtype=np.int64)
    return np.where(table.any(axis=0), table.argmax(axis=0), -1).astype(np.int64)
