"""Attribution: which part of each sub-layer changed the gradient by how many decades, adding up to the measured total.

Arrays ``[sublayer]`` of one residual stream in execution order in, frozen results out. Decades (log10) are counted from
the output towards the input: **negative means that the gradient shrinks on its way in**.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keelscope.analysis.profile import FLOAT32_FLOOR

__all__ = ["CAUSES", "Attribution", "Cause", "attribute"]

CAUSES = ("norm", "scale", "branch", "other", "embedding")
"""The causes that every total is split into, in the order in which a gradient meets them."""
_PAIRS = (("norm", "scale", 0.005), ("branch", "other", 1.0))
"""Causes that are told as one where they oppose each other by more than so many decades."""

Decades = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause and the decades it explains."""

    name: str
    """One of `CAUSES`, or two that cancel: ``"norm and scale"``, ``"branch and other"``."""
    decades: float


@dataclass(frozen=True, slots=True, eq=False)
class Attribution:
    """The change of the gradient over one stream, split by cause.

    With z = a x + F, n the norm on the sum, g' the gradient after and g the one before a sub-layer:
    ``log10 |g|/|g'| = log10 |J_n^T g'|/|g'| + log10 |a J_n^T g'|/|J_n^T g'| + log10 |g|/|a J_n^T g'|``.
    """

    norm: Decades
    """``[sublayer]``: by the norm on the sum; NaN where not known, as in the next three."""
    scale: Decades
    """``[sublayer]``: by the weight or gate on the shortcut."""
    branch: Decades
    """``[sublayer]``: by the branch, which adds its own gradient to the shortcut's. All of it where the shortcut passes
    exactly nothing."""
    other: Decades
    """``[sublayer]``: between this sub-layer and the next used one above, and in it where a part is not known."""
    used: NDArray[np.bool_]
    """``[sublayer]``: whether both its gradients are finite and above the float floor."""
    stream: float
    """Measured: log10 of the gradient entering the lowest used sub-layer over the one at the top; NaN without any."""
    embedding: float = float("nan")
    """Between the lowest used sub-layer and the input end of the model; NaN if not measured."""

    @property
    def totals(self) -> dict[str, float]:
        """Decades of every cause over the stream; they add up to `total`."""
        split = {name: float(np.nansum(getattr(self, name))) for name in CAUSES[:-1]}
        return split | {"embedding": 0.0 if np.isnan(self.embedding) else self.embedding}

    @property
    def total(self) -> float:
        """Measured change from the top of the stream to the input end, in decades."""
        return self.stream if np.isnan(self.embedding) else self.stream + self.embedding

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The totals as they are told, two that cancel as one.

        Norm and scale, since ``n(a x)`` is ``n(x)``; branch and other, where sub-layers do not follow each other on one
        tensor, as in a scheme that mixes all earlier ones.
        """
        found: dict[str, float] = {}
        totals = self.totals
        for first, second, limit in _PAIRS:
            a, b = totals.pop(first), totals.pop(second)
            cancels = min(abs(a), abs(b)) > limit and a * b < 0
            found |= {f"{first} and {second}": a + b} if cancels else {first: a, second: b}
        return tuple(Cause(name, decades) for name, decades in (found | totals).items())

    @property
    def largest(self) -> Cause | None:
        """The cause that changed the gradient most; None if nothing is known."""
        return None if np.isnan(self.stream) else max(self.causes, key=lambda cause: abs(cause.decades))


def attribute(
    output_gradient: ArrayLike,
    sum_gradient: ArrayLike,
    shortcut_part: ArrayLike,
    input_gradient: ArrayLike,
    *,
    end: float = float("nan"),
    floor: float = FLOAT32_FLOOR,
) -> Attribution:
    """Split the change of the gradient over a stream by cause.

    Args:
        output_gradient: ``[sublayer]``, norm of the gradient at the stream after each, bottom first.
        sum_gradient: ``[sublayer]``, at the weighted sum, under the norm.
        shortcut_part: ``[sublayer]``, what the shortcut passes on.
        input_gradient: ``[sublayer]``, at the stream entering.
        end: norm of the gradient at the input end of the model.
        floor: smallest usable norm; sub-layers below it, at 0 or not finite are left out.

    Returns:
        The attribution. What lies between two used sub-layers counts as "other" of the lower one.

    Example:
        >>> split = attribute([2.0, 20.0], [1.0, 10.0], [1.0, 10.0], [2.0, 2.0])
        >>> split.norm.round(3).tolist(), split.branch.round(3).tolist(), split.total
        ([-0.301, -0.301], [0.301, -0.699], -1.0)
    """
    after, total, shortcut, before = (
        np.asarray(a, dtype=np.float64) for a in (output_gradient, sum_gradient, shortcut_part, input_gradient)
    )
    known = [_usable(array, floor) for array in (after, total, shortcut, before)]
    used = known[0] & known[3]
    logs = [_log10(array, mask & used) for array, mask in zip((after, total, shortcut, before), known, strict=True)]
    norm, scale, branch = logs[1] - logs[0], logs[2] - logs[1], logs[3] - logs[2]
    cut = used & known[1] & (shortcut == 0)
    scale, branch = np.where(cut, 0.0, scale), np.where(cut, logs[3] - logs[1], branch)
    other = _other(logs[0], logs[3], np.stack([norm, scale, branch]), used)
    chain = np.flatnonzero(used)
    stream = float(logs[3][chain[0]] - logs[0][chain[-1]]) if chain.size else float("nan")
    embedding = float("nan")
    if chain.size and bool(_usable(np.array([end]), floor)[0]):
        embedding = float(np.log10(end) - logs[3][chain[0]])
    return Attribution(norm, scale, branch, other, used, stream, embedding)


def _other(after: Decades, before: Decades, parts: Decades, used: NDArray[np.bool_]) -> Decades:
    """What the parts of a sub-layer leave, and the change up to the next used one."""
    incomplete = np.isnan(parts).any(axis=0)
    other = np.where(incomplete, before - after - np.nansum(parts, axis=0), 0.0)
    chain = np.flatnonzero(used)
    other[chain[:-1]] += after[chain[:-1]] - before[chain[1:]]
    return np.where(used, other, np.nan)


def _usable(values: NDArray[np.float64], floor: float) -> NDArray[np.bool_]:
    return np.asarray(np.isfinite(values) & (values >= floor))


def _log10(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> Decades:
    return np.asarray(np.log10(values, out=np.full(values.shape, np.nan), where=mask))
