r"""Gates and residual weights: what they are, how far they are saturated, and whether a gradient reaches them.

A sub-layer is ``x' = n(a x + b F(c x))``; a gate is what one of its weights a, b, c is made of, ``T = s(p)`` with p a
parameter or computed from the stream and s the identity, a sigmoid, a clamp, ... Its gradient is
``dL/dp = sum of s'(p) <dL/dT>``: where s' is 0 the gate cannot move, and where T also switches its branch off, nothing
behind it can. Schemes differ in which weight it is and where it starts: Highway (arXiv 1505.00387), Fixup (arXiv
1901.09321), SkipInit (arXiv 2002.10444), ReZero (arXiv 2003.04887), LayerScale (arXiv 2103.17239), DeepNorm (arXiv
2203.00555).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import SQUARES, Columns, Statistic, Terms

__all__ = ["GATES", "GATE_GRADIENTS"]

_FLAT = 1e-3


def _weights_of(pairs: Tensor) -> Tensor:
    """Terms of ``[entry, (weight, slope)]``, one column each."""
    return _weights_of_many([pairs])[0] if pairs.shape[0] else _NOTHING.to(pairs.device)


def _weights_of_many(pairs: list[Tensor]) -> Tensor:
    """Terms of many gates, ``[gate, column]``; those of one size together."""
    sizes: dict[int, list[int]] = {}
    for position, one in enumerate(pairs):
        sizes.setdefault(one.shape[0], []).append(position)
    rows: list[Tensor] = [_NOTHING.to(pairs[0].device)] * len(pairs)
    for size, positions in sizes.items():
        if size:
            found = _rows(torch.stack([pairs[position] for position in positions]).double())
            for position, row in zip(positions, found.unbind(), strict=True):
                rows[position] = row
    return torch.stack(rows)


def _rows(pairs: Tensor) -> Tensor:
    """``[gate, entry, 2] -> [gate, column]``."""
    weights, slopes = pairs[..., 0], pairs[..., 1]  # [gate, entry]
    known = ~slopes.isnan()
    columns = [known.new_full(known.shape, fill_value=True).sum(1), weights.sum(1), weights.amin(1), weights.amax(1)]
    columns += [known.sum(1), (slopes.abs() < _FLAT).sum(1)]
    return torch.stack([column.double() for column in columns], dim=1)


def _merge(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums, but for the smallest and the largest weight."""
    with np.errstate(invalid="ignore"):  # an infinite weight is recorded, not warned about
        merged = a + b
    merged[..., 2] = np.minimum(a[..., 2], b[..., 2])
    merged[..., 3] = np.maximum(a[..., 3], b[..., 3])
    return merged


_NOTHING = torch.tensor([0.0, 0.0, np.inf, -np.inf, 0.0, 0.0], dtype=torch.float64)
_WEIGHTS = Terms(
    "weights",
    ("count", "total", "low", "high", "known", "flat"),
    _weights_of,
    _merge,
    of_many=_weights_of_many,
)


def _where(t: Columns, column: str) -> NDArray[np.float64]:
    return np.where(t["count"] > 0, t[column], np.nan)


VALUE = Statistic(
    "value",
    _WEIGHTS,
    lambda t: np.where(t["count"] > 0, t["total"] / t["count"], np.nan),
    "1",
    "Mean weight that the gate gives, after its sigmoid, clamp or other function.",
    across_ranks="mean",
)
MINIMUM = Statistic("minimum", _WEIGHTS, lambda t: _where(t, "low"), "1", "Smallest weight that the gate gives.")
MAXIMUM = Statistic(
    "maximum", _WEIGHTS, lambda t: _where(t, "high"), "1", "Largest weight that the gate gives.", across_ranks="max"
)
SATURATED_FRACTION = Statistic(
    "saturated_fraction",
    _WEIGHTS,
    lambda t: np.where((t["count"] > 0) & (t["known"] == t["count"]), t["flat"] / t["count"], np.nan),
    "1",
    "Share of weights whose slope |d weight / d parameter| is below 0.001, constant factors left out; NaN for "
    "constants and where the function between parameter and weight is not known.",
    across_ranks="mean",
)
GRADIENT = Statistic(
    "gradient",
    SQUARES,
    lambda t: np.where(t["count"] > 0, np.sqrt(t["squares"]), np.nan),
    "1",
    "Norm of the gradient at the gate's parameter over the whole step, before clipping; at the output of the gate's "
    "module where it depends on data. NaN for constants and buffers.",
    across_ranks="rms",
    grows=0.5,
)

GATES = TensorProbe("gates", Tap.GATE, (VALUE, MINIMUM, MAXIMUM, SATURATED_FRACTION))
GATE_GRADIENTS = TensorProbe(
    "gate_gradients",
    Tap.GATE_GRADIENT,
    (GRADIENT,),
    group="gates",
)
