"""How finished values of several ranks become one value, see `schema.StatisticSpec.across_ranks`.

Used by `merged` when a run of several processes is read or sealed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEEDS_ALL", "combined"]

Values = NDArray[np.float64]
NEEDS_ALL = frozenset({"sum", "root_sum_squares"})
"""Ways that give a number only when every rank has one."""


def combined(how: str, values: Values, seen: NDArray[np.bool_]) -> Values:
    """One value per step and site.

    The root sum of squares is taken by ``hypot``, so that 1e-200 does not become 0 nor 1e200 infinite.

    Args:
        how: ``"sum"``, ``"max"``, ``"mean"``, ``"rms"`` or ``"root_sum_squares"``; anything else takes the first rank.
        values: ``[rank, step, site, ...]``.
        seen: ``[rank, step, site]``; values that were not seen take no part.

    Returns:
        ``[step, site, ...]``; NaN where no rank has a value.

    Example:
        >>> two = np.array([[[3.0]], [[4.0]]])
        >>> [combined(how, two, two > 0).item() for how in ("sum", "max", "mean", "root_sum_squares")]
        [7.0, 4.0, 3.5, 5.0]
    """
    if how not in _WAYS:
        return np.asarray(values[0])
    mask = seen.reshape(*seen.shape, *(1 for _ in values.shape[3:]))
    count = mask.sum(axis=0)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        result = _WAYS[how](values, mask, count)
    return np.asarray(np.where(count > 0, result, np.nan))


def _sum(values: Values, mask: NDArray[np.bool_], _: NDArray[np.int64]) -> Values:
    return np.asarray(np.where(mask, values, 0.0).sum(axis=0))


def _max(values: Values, mask: NDArray[np.bool_], _: NDArray[np.int64]) -> Values:
    return np.asarray(np.where(mask, values, -np.inf).max(axis=0))


def _mean(values: Values, mask: NDArray[np.bool_], count: NDArray[np.int64]) -> Values:
    return np.asarray(_sum(values, mask, count) / count)


def _root_sum_squares(values: Values, mask: NDArray[np.bool_], _: NDArray[np.int64]) -> Values:
    return np.asarray(np.hypot.reduce(np.where(mask, values, 0.0), axis=0))


def _rms(values: Values, mask: NDArray[np.bool_], count: NDArray[np.int64]) -> Values:
    return np.asarray(_root_sum_squares(values, mask, count) / np.sqrt(count))


_WAYS: Mapping[str, Callable[[Values, NDArray[np.bool_], NDArray[np.int64]], Values]] = {
    "sum": _sum,
    "max": _max,
    "mean": _mean,
    "root_sum_squares": _root_sum_squares,
    "rms": _rms,
}
