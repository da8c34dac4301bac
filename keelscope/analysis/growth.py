"""How a quantity grows over depth: level, linear, as a power or exponentially, chosen by the evidence.

Used by the rule ``variance_growth``: a sum of unlike branches grows linearly with depth, which is what Pre-LN does by
design; a stream whose branches grow with it grows exponentially, which no scheme intends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Growth", "Law", "growth_law"]

Law = Literal["level", "linear", "power", "exponential", "unknown"]

_MIN_POINTS = 4
_NOISE = 1e-4  # mean squared error in ln below which laws are not told apart: 1 %
_OFFSETS = np.geomspace(1e-3, 1e3, 241)  # start of a linear law over what one unit of depth adds
_DECIDED = 2.0  # difference of BIC from which evidence counts (Kass and Raftery 1995: "positive")


@dataclass(frozen=True, slots=True)
class Growth:
    """The law that a quantity follows over depth."""

    law: Law
    """``"unknown"`` for fewer than 4 usable values."""
    rate: float
    """linear: increase per unit of depth over the value at depth 0 (inf for a law through 0); power: the exponent;
    exponential: decades per unit of depth; level: 0; unknown: NaN."""
    margin: float
    """By how much the BIC of the best other law is larger; small where laws cannot be told apart."""

    @property
    def is_decided(self) -> bool:
        """Whether the law stands out from the others."""
        return self.margin >= _DECIDED


def growth_law(depth: ArrayLike, values: ArrayLike) -> Growth:
    """The law with the smallest Bayesian information criterion.

    Laws: ``v = c``, ``v = c (r + l)``, ``v = c l^p``, ``v = c exp(k l)``, fitted to ln v by least squares; with n
    values, mean squared error e and q parameters, BIC = n ln(e) + q ln(n). Errors below 1 % count as equal, so that
    rounding decides nothing, and of laws that then fit alike the earlier one is taken.

    Source: Schwarz (1978), "Estimating the dimension of a model".

    Args:
        depth: ``[layer]``, positive and increasing.
        values: ``[layer]``, positive; others are left out.

    Returns:
        The law.

    Example:
        >>> l = np.arange(1.0, 33.0)
        >>> [growth_law(l, v).law for v in (np.full(32, 2.0), 1 + 0.5 * l, l**2.0, 1.2**l)]
        ['level', 'linear', 'power', 'exponential']
        >>> round(growth_law(l, 10 ** (0.1 * l)).rate, 6)
        0.1
    """
    place, level = np.asarray(depth, dtype=np.float64), np.asarray(values, dtype=np.float64)
    usable = np.isfinite(level) & (level > 0) & (place > 0)
    place, logs = place[usable], np.log(level[usable])
    if logs.size < _MIN_POINTS:
        return Growth("unknown", float("nan"), 0.0)
    linear, offset = _linear(place, logs)
    power, exponent = _straight(np.log(place), logs)
    exponential, constant = _straight(place, logs)
    fits: list[tuple[Law, float, int, float]] = [
        ("level", float(np.var(logs)), 1, 0.0),
        ("linear", linear, 2, 1.0 / offset),
        ("power", power, 2, exponent),
        ("exponential", exponential, 2, constant / np.log(10.0)),
    ]
    size = logs.size
    scores = [size * np.log(max(error, _NOISE)) + count * np.log(size) for _, error, count, _ in fits]
    best, second = np.argsort(scores, kind="stable")[:2]
    return Growth(fits[best][0], float(fits[best][3]), float(scores[second] - scores[best]))


def _straight(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Mean squared error and slope of a straight line."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return float(np.var(y - slope * centred)), slope


def _linear(place: NDArray[np.float64], logs: NDArray[np.float64]) -> tuple[float, float]:
    """Mean squared error and offset r of ``ln c + ln(r + l)``: c is the mean, r is searched."""
    offsets = _OFFSETS * place[-1] / 10.0
    left = logs - np.log(offsets[:, None] + place)  # [offset, layer]
    errors = left.var(axis=1)
    best = int(errors.argmin())
    return float(errors[best]), float(offsets[best])
