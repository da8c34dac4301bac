"""How many bits of a number a sealed file keeps: all of them, those of float32, or ten.

Rounding to nearest, ties to even, on the bits of float64: the range stays that of float64; zero, NaN and infinities
stay what they are. Zeroed bits compress to nothing. Used by `sealedfile` and `overview`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import UsageError

__all__ = ["PRECISIONS", "check_precision", "fits_float32", "rounded"]

PRECISIONS: Mapping[str, int] = {"exact": 52, "float32": 23, "10bit": 10}
"""Bits of the mantissa that are kept, the leading one not counted."""
_MANTISSA = 52


def check_precision(precision: str) -> None:
    """Refuse a word that is no precision.

    Args:
        precision: the word.

    Raises:
        UsageError: if it is none of `PRECISIONS`.
    """
    if precision not in PRECISIONS:
        raise UsageError(f"precision={precision!r} is not known; use {', '.join(map(repr, PRECISIONS))}.")


def rounded(values: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """Values with so many bits of mantissa; the relative error is at most ``2 ** -(bits + 1)``.

    Args:
        values: any shape.
        bits: 1 to 52.

    Returns:
        The same array for 52 bits, else a new one.

    Example:
        >>> rounded(np.array([1.0, 1 / 3, -1e300, np.inf, 0.0]), 10).tolist()
        [1.0, 0.333251953125, -9.999613405687273e+299, inf, 0.0]
    """
    if bits >= _MANTISSA:
        return values
    drop = np.uint64(_MANTISSA - bits)
    raw = np.ascontiguousarray(values).view(np.uint64)
    odd = (raw >> drop) & np.uint64(1)
    half = np.uint64((1 << int(drop) - 1) - 1)
    found = ((raw + half + odd) >> drop << drop).view(np.float64)
    return np.where(np.isfinite(values) & np.isfinite(found), found, values)


def fits_float32(values: NDArray[np.float64]) -> bool:
    """Whether float32 holds the values without changing one.

    Args:
        values: any shape.

    Returns:
        True if every number comes back the same.

    Example:
        >>> [fits_float32(np.array([value])) for value in (0.5, np.nan, np.inf, 0.1, 1e-60)]
        [True, True, True, False, False]
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return bool(np.array_equal(values.astype(np.float32).astype(np.float64), values, equal_nan=True))
