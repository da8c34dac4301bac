"""The shortcut path of one residual stream over depth: what reaches each sub-layer by shortcuts alone.

Arrays ``[sublayer]`` in execution order in, frozen results out. Everything is in decades (log10) counted from the
output towards the input, so that **negative means lost**. `attribution` splits the whole gradient;
`keelscope.diagnosis.paths` reads both from a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keelscope.analysis.profile import FLOAT32_FLOOR, DepthProfile, depth_profile

__all__ = ["ShortcutPath", "cumulative", "shortcut_path"]

Decades = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ShortcutPath:
    """The shortcut path of one stream."""

    gains: Decades
    """``[sublayer]``: log10 of the shortcut gain; -Inf where the shortcut is cut, NaN where it is not known."""
    from_top: Decades
    """``[sublayer]``: sum of `gains` from the top of the stream down to and including the sub-layer."""
    from_bottom: Decades
    """``[sublayer]``: sum of `gains` from the bottom of the stream up to and including the sub-layer."""
    predicted: Decades
    """``[sublayer]``: the same from the top by the law ``1/2 log10(1 + v / alpha^2)`` per sub-layer."""
    carried: Decades
    """``[sublayer]``: what shortcuts alone carry from the top to the stream entering the sub-layer. Measured where the
    shortcut-only gradient is known and above the float floor, continued by `gains` elsewhere."""
    is_measured: NDArray[np.bool_]
    """``[sublayer]``: whether `carried` is a measured value there."""
    profile: DepthProfile
    """Shape of the shortcut-only gradient; empty of values if it was not recorded."""
    mean_branch_gain: float
    """Mean of v = ms(F) / ms(x); NaN if not known."""
    mean_alpha: float
    """Geometric mean of the shortcut weights; NaN if not known."""

    @property
    def change(self) -> float:
        """Decades from the top to the lowest sub-layer whose level is known; negative when the shortcut loses."""
        known = self.carried[~np.isnan(self.carried)]
        return float(known[0]) if known.size else float("nan")

    @property
    def lost(self) -> float:
        """Decades that the shortcut loses over the stream; negative when it gains."""
        return 0.0 - self.change

    @property
    def lowest(self) -> int:
        """Index of the sub-layer above which shortcuts lose most; -1 if nothing is known.

        It lies above the bottom where another path joins further down, as the second stream of ResiDual does.
        """
        known = np.flatnonzero(~np.isnan(self.carried))
        return int(known[np.argmin(self.carried[known])]) if known.size else -1

    @property
    def missing(self) -> int:
        """Sub-layers of unknown shortcut gain, which the sums leave out."""
        return int(np.isnan(self.gains).sum())

    @property
    def floored(self) -> int:
        """Sub-layers whose shortcut-only gradient lies under the float floor and is left out of the slope."""
        return self.profile.floored

    @property
    def slope(self) -> float:
        """Decades per sub-layer of the shortcut-only gradient, positive when it shrinks towards the input."""
        return self.profile.slope


def shortcut_path(
    shortcut_gain: ArrayLike,
    *,
    shortcut_only: ArrayLike | None = None,
    top: float = float("nan"),
    predicted_slope: ArrayLike | None = None,
    branch_gain: ArrayLike | None = None,
    alpha: ArrayLike | None = None,
    floor: float = FLOAT32_FLOOR,
) -> ShortcutPath:
    """The shortcut path of one stream.

    Args:
        shortcut_gain: ``[sublayer]``, alpha times the gain of the norm on the sum; NaN where not observed.
        shortcut_only: ``[sublayer]``, norm of the top gradient carried by shortcuts alone to the stream entering each.
        top: norm of the gradient at the top of the stream.
        predicted_slope: ``[sublayer]``, decades lost by the law, ``1/2 log10(1 + v / alpha^2)``.
        branch_gain: ``[sublayer]``, v.
        alpha: ``[sublayer]``, weight of the shortcut.
        floor: smallest usable gradient norm; smaller ones are masked.

    Returns:
        The path; what was not given is NaN.

    Example:
        >>> path = shortcut_path([0.1, 1.0, 0.1], shortcut_only=[0.02, 0.2, 0.2], top=2.0)
        >>> path.from_top.tolist(), path.from_bottom.tolist(), round(path.lost, 6)
        ([-2.0, -1.0, -1.0], [-1.0, -1.0, -2.0], 2.0)
    """
    gains = _log10(np.asarray(shortcut_gain, dtype=np.float64))
    missing = np.full(gains.shape, np.nan)
    profile = depth_profile(missing if shortcut_only is None else shortcut_only, floor=floor)
    carried, is_measured = _carried(gains, profile, top, floor)
    law = missing if predicted_slope is None else -np.asarray(predicted_slope, dtype=np.float64)
    return ShortcutPath(
        gains=gains,
        from_top=cumulative(gains[::-1])[::-1],
        from_bottom=cumulative(gains),
        predicted=cumulative(law[::-1])[::-1],
        carried=carried,
        is_measured=is_measured,
        profile=profile,
        mean_branch_gain=_mean(missing if branch_gain is None else np.asarray(branch_gain, dtype=np.float64)),
        mean_alpha=10.0 ** _mean(_log10(missing if alpha is None else np.asarray(alpha, dtype=np.float64))),
    )


def cumulative(decades: ArrayLike) -> Decades:
    """Running sum that leaves out what is not known and stays NaN there.

    Args:
        decades: ``[sublayer]``, in the order of summation.

    Returns:
        ``[sublayer]``.

    Example:
        >>> cumulative([1.0, float("nan"), 2.0]).tolist()
        [1.0, nan, 3.0]
    """
    values = np.asarray(decades, dtype=np.float64)
    sums = np.cumsum(np.where(np.isnan(values), 0.0, values))
    return np.where(np.isnan(values), np.nan, sums)


def _carried(gains: Decades, profile: DepthProfile, top: float, floor: float) -> tuple[Decades, NDArray[np.bool_]]:
    """Measured levels against the top, continued by the gains where there are none."""
    reference = np.log10(top) if np.isfinite(top) and top >= floor else np.nan
    cut = cumulative(gains[::-1])[::-1]  # a 0 without one says that the loss reads other tokens than the stream's
    measured = np.where(profile.is_zero, np.where(np.isfinite(cut), np.nan, -np.inf), profile.levels - reference)
    if np.isnan(reference):
        measured = np.full(gains.shape, np.nan)
    is_measured = ~np.isnan(measured)
    carried = np.full(gains.shape, np.nan)
    level = 0.0
    for index in range(gains.size - 1, -1, -1):
        if is_measured[index]:
            level = carried[index] = measured[index]
        elif not np.isnan(gains[index]):
            level = carried[index] = level + gains[index]
    return carried, is_measured


def _log10(values: Decades) -> Decades:
    """log10 of what is finite and not negative; -Inf of 0, NaN of the rest."""
    known = np.isfinite(values) & (values >= 0)
    with np.errstate(divide="ignore"):
        return np.log10(values, out=np.full(values.shape, np.nan), where=known)


def _mean(values: Decades) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")
