"""The shape of a gradient over depth: its level per layer in decades, robust slope, span, knee and flatness.

Arrays in, frozen results out. `keelscope.diagnosis` decides from these numbers; `compare` puts several of them on one
axis. Sign convention everywhere: depth grows from the input to the output, so a slope is **positive when the gradient
shrinks towards the input** (it vanishes) and negative when it grows towards the input (it explodes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["FLOAT32_FLOOR", "KNEE", "MIN_LAYERS", "DepthProfile", "Knee", "depth_profile", "theil_sen"]

FLOAT32_FLOOR = 1e-37
"""Values below it are float32 subnormals or close to them: their logarithm says nothing about the model."""
MIN_LAYERS = 4
"""Layers that a slope needs."""

KNEE = 1.0
"""Decades between neighbours of one role, beyond what the slope explains, that make a knee worth a finding."""

_WINDOW = (0.1, 0.9)  # share of the depth that a slope is fitted to: embedding end, first block and head end left out
_NEAR = 0.5  # decades around the median level that count as flat
_UNDERFLOW = 1e-30  # a profile that comes down to this level reaches exact zeros by underflow
_STEP_LAYERS = 8  # fitted layers that a step needs to be told from a slope
_STEP_FIT = 0.5  # share of the deviations from a straight line that a step has to leave at most
_MAX_POINTS = 2000  # 2e6 pairs: 16 MB and about 30 ms


@dataclass(frozen=True, slots=True)
class Knee:
    """The largest change between two neighbouring layers of one role."""

    lower: int
    """Index of the layer on the input side."""
    upper: int
    """Index of the layer on the output side."""
    change: float
    """Decades from `upper` to `lower`; positive when the gradient drops towards the input."""
    excess: float
    """`change` minus what the fitted slope explains, in decades."""


@dataclass(frozen=True, slots=True, eq=False)
class DepthProfile:
    """One quantity over the layers of a chain, in decades (log10)."""

    levels: NDArray[np.float64]
    """``[layer]``, input side first; NaN where there is no usable value."""
    depth: NDArray[np.float64]
    """``[layer]``: sub-layers (or blocks, modules) between the input and the layer's output."""
    length: float
    """L, the depth of the whole chain in the same unit."""
    slope: float
    """Theil-Sen slope over the middle 10..90 % of the covered layers, `step` taken off, in decades per unit; NaN
    without a fit."""
    span: float
    """Highest minus lowest level inside the fitted layers, in decades."""
    flatness: float
    """Share of the usable layers within half a decade of their median level: 1 is flat."""
    knee: Knee | None
    fitted: int
    """Layers that the slope is fitted to."""
    is_zero: NDArray[np.bool_]
    """``[layer]``: exactly 0 while the rest is far from underflow."""
    is_floored: NDArray[np.bool_]
    """``[layer]``: under the float floor, or exactly 0 by underflow; left out of the fit."""
    step: Knee | None = None
    """A lasting change at one place, between two parts that a common slope fits; it is no matter of depth."""

    @property
    def is_observed(self) -> NDArray[np.bool_]:
        """``[layer]``: has a finite value, exact zeros included."""
        return np.isfinite(self.levels) | self.is_zero | self.is_floored

    @property
    def observed(self) -> int:
        """Number of observed layers."""
        return int(self.is_observed.sum())

    @property
    def zeros(self) -> int:
        """Number of layers that are exactly 0."""
        return int(self.is_zero.sum())

    @property
    def floored(self) -> int:
        """Number of layers under the floor."""
        return int(self.is_floored.sum())

    @property
    def covered(self) -> float:
        """Depth of the part that has usable values, from its first layer to its last one; L when the ends have them."""
        usable = np.flatnonzero(np.isfinite(self.levels) | self.is_floored)
        if not usable.size:
            return 0.0
        first, last = int(usable[0]), int(usable[-1])
        below = float(self.depth[first - 1]) if first else 0.0
        return (self.length if last == self.levels.size - 1 else float(self.depth[last])) - below

    @property
    def is_partial(self) -> bool:
        """Whether layers at an end of the chain have no usable value, so that the figures are about the rest."""
        return self.covered < self.length

    @property
    def usable(self) -> int:
        """Number of layers with a nonzero value."""
        return int((np.isfinite(self.levels) | self.is_floored).sum())

    @property
    def stops(self) -> bool:
        """Whether it is exactly 0 at the input end of what was observed, or in more than half of it."""
        at_input = bool(self.is_zero[self.is_observed][:1].any())
        return at_input or 2 * self.zeros > self.observed

    @property
    def total(self) -> float:
        """S = slope x covered depth: decades that the gradient loses from the output to the input of what it reaches.

        Nothing is extrapolated over layers without gradient; with a gradient at both ends it is slope x L.
        """
        return self.slope * self.covered


def depth_profile(
    values: ArrayLike,
    depth: ArrayLike | None = None,
    *,
    length: float | None = None,
    roles: Sequence[str] = (),
    floor: float = FLOAT32_FLOOR,
    skip: int = 0,
) -> DepthProfile:
    """The profile of one quantity over depth.

    Args:
        values: ``[layer]``, linear and not negative, input side first; NaN where not observed.
        depth: ``[layer]``, strictly increasing; 1, 2, 3, ... by default.
        length: L; the last depth by default.
        roles: ``[layer]``; neighbours are compared for the knee only within one role. All alike by default.
        floor: smallest usable value.
        skip: layers at the input side that take no part in the knee (a first block that differs by design).

    Returns:
        Levels and figures; figures that cannot be computed are NaN.

    Example:
        >>> p = depth_profile([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
        >>> round(p.slope, 6), round(p.total, 6), p.fitted
        (1.0, 5.0, 5)
    """
    linear = np.asarray(values, dtype=np.float64)
    place = np.arange(1.0, linear.size + 1) if depth is None else np.asarray(depth, dtype=np.float64)
    total_length = float(length if length is not None else (place[-1] if place.size else 0.0))
    levels, zeros, floored = _levels(linear, floor)
    fit = _fit_mask(levels, floored)
    filled = np.where(floored & fit, np.log10(max(floor, np.finfo(np.float64).tiny)), levels)
    slope = theil_sen(place[fit], filled[fit])
    step = None if floored.any() else _lasting_step(levels, place, fit, roles=roles, skip=skip)
    if step is not None:
        slope = theil_sen(place[fit], _without(levels, step)[fit])
    inside = levels[fit & np.isfinite(levels)]
    return DepthProfile(
        levels=levels,
        depth=place,
        length=total_length,
        slope=slope,
        span=float(np.ptp(inside)) if inside.size else np.nan,
        flatness=_flatness(levels),
        knee=_knee(levels, place, slope, roles=roles, skip=skip),
        fitted=int(fit.sum()),
        is_zero=zeros,
        is_floored=floored,
        step=step,
    )


def theil_sen(x: ArrayLike, y: ArrayLike) -> float:
    """Theil-Sen slope: the median of ``(y_j - y_i) / (x_j - x_i)`` over all pairs i < j.

    Up to 29 % of the points may be arbitrarily wrong. Exact up to 2,000 points; more are first reduced to 2,000
    blocks of neighbours by their medians, which keeps time and memory bounded (30 ms, 16 MB).

    Args:
        x: ``[point]``, strictly increasing.
        y: ``[point]``, finite.

    Returns:
        The slope; NaN for fewer than two points.

    Example:
        >>> theil_sen([0, 1, 2, 3, 4], [0, 2, 4, 6, 100])
        2.0
    """
    points, heights = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if points.size < 2:
        return float("nan")
    if points.size > _MAX_POINTS:
        points, heights = _block_medians(points), _block_medians(heights)
    lags = range(1, points.size)
    slopes = np.concatenate([(heights[k:] - heights[:-k]) / (points[k:] - points[:-k]) for k in lags])
    return float(np.median(slopes))


def _block_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([np.median(block) for block in np.array_split(values, _MAX_POINTS)])


def _levels(
    linear: NDArray[np.float64], floor: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """log10 of the usable values, and which layers are exact zeros or under the floor."""
    finite = np.isfinite(linear)
    positive = finite & (linear > 0)
    usable = positive & (linear >= floor)
    zeros = finite & (linear == 0)
    floored = positive & ~usable
    if floored.any() or bool((linear[positive] < _UNDERFLOW).any()):
        floored, zeros = floored | zeros, np.zeros_like(zeros)
    levels = np.full(linear.shape, np.nan)
    levels[usable] = np.log10(linear[usable])
    return levels, zeros, floored


def _fit_mask(levels: NDArray[np.float64], floored: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Usable layers in the middle of the covered part; where the floor leaves too few, whatever tells the direction."""
    usable = np.isfinite(levels)
    covered = np.flatnonzero(usable | floored)
    first, size = (int(covered[0]), int(np.ptp(covered)) + 1) if covered.size else (0, 1)
    share = (np.arange(levels.size) - first + 0.5) / size
    middle = usable & (share >= _WINDOW[0] - 1e-9) & (share <= _WINDOW[1] + 1e-9)
    if middle.sum() >= MIN_LAYERS or not floored.any():
        return np.asarray(middle)
    if usable.sum() >= 2:
        return np.asarray(usable)
    beside = np.zeros_like(usable)
    beside[:-1] |= usable[1:]
    beside[1:] |= usable[:-1]
    return np.asarray(usable | (beside & floored))


def _lasting_step(
    levels: NDArray[np.float64], depth: NDArray[np.float64], fit: NDArray[np.bool_], *, roles: Sequence[str], skip: int
) -> Knee | None:
    """The knee, if the level stays changed beyond it and either side has the same slope: a step, not a slope."""
    if fit.sum() < _STEP_LAYERS:
        return None
    typical = float(np.median(np.diff(levels[fit]) / np.diff(depth[fit])))
    knee = _knee(levels, depth, typical, roles=roles, skip=skip)
    if knee is None or min(abs(knee.change), abs(knee.excess)) <= KNEE or not (fit[knee.lower] and fit[knee.upper]):
        return None
    straight, stepped = (_deviation(depth[fit], y[fit]) for y in (levels, _without(levels, knee)))
    return knee if stepped < _STEP_FIT * straight else None


def _without(levels: NDArray[np.float64], step: Knee) -> NDArray[np.float64]:
    """The levels with the part below a step moved up to the part above."""
    return np.where(np.arange(levels.size) <= step.lower, levels + step.excess, levels)


def _deviation(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """Mean absolute deviation from the robust line."""
    rest = y - theil_sen(x, y) * x
    return float(np.mean(np.abs(rest - np.median(rest))))


def _flatness(levels: NDArray[np.float64]) -> float:
    usable = levels[np.isfinite(levels)]
    return float(np.mean(np.abs(usable - np.median(usable)) <= _NEAR)) if usable.size else float("nan")


def _knee(
    levels: NDArray[np.float64], depth: NDArray[np.float64], slope: float, *, roles: Sequence[str], skip: int
) -> Knee | None:
    names = np.asarray(roles if len(roles) else [""] * levels.size)
    found: Knee | None = None
    for role in dict.fromkeys(names.tolist()):
        members = np.flatnonzero(names == role)
        members = members[members >= skip]
        for lower, upper in pairwise(members.tolist()):
            change = float(levels[upper] - levels[lower])
            if np.isfinite(change) and (found is None or abs(change) > abs(found.change)):
                trend = 0.0 if np.isnan(slope) else slope * float(depth[upper] - depth[lower])
                found = Knee(lower, upper, change, change - trend)
    return found
