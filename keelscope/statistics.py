"""Mergeable statistics: terms computed from a tensor on its device, merged and finished on the host.

A statistic is (terms, merge, finish) with the law ``of(a ++ b) == merge(of(a), of(b))``, where ``++`` joins along the
first axis. The same merge serves several calls of a module, micro-batches and ranks; `tests/test_statistics.py` checks
the law for every registered statistic. `keelscope.probe` groups statistics by the tensor they are taken from.

```
tensor --of--> [column] float64 on the device --one transfer per step--> merge over observations --finish--> value
```
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelscope.entries import blocks, constant, implicit_zeros, stored
from keelscope.hostsums import host_moments, host_squares
from keelscope.kernel import Routine
from keelscope.onhost import place_of
from keelscope.store.schema import StatisticSpec

__all__ = [
    "KURTOSIS",
    "MAX_ABS",
    "MEAN",
    "MOMENTS",
    "NONFINITE_COUNT",
    "NORM",
    "POWERS",
    "RMS",
    "SQUARES",
    "VARIANCE",
    "ZERO_FRACTION",
    "Columns",
    "Statistic",
    "Terms",
    "additive",
]

Columns = Mapping[str, NDArray[np.float64]]

_ROUNDING = 1e-14  # a spread below this share of the mean is what float64 sums leave of a constant


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """Partial results that several statistics share; computed once per tensor.

    Example:
        >>> MOMENTS.merge(MOMENTS.of(torch.tensor([1.0])).numpy(), MOMENTS.of(torch.tensor([3.0])).numpy())[:3].tolist()
        [2.0, 2.0, 2.0]
    """

    name: str
    columns: tuple[str, ...]
    of: Callable[..., Tensor]
    """Tensors of one observation -> ``[column]`` float64 on their device; no host synchronisation, no randomness."""
    merge: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
    """Two arrays ``[..., column]`` -> their union; associative and commutative up to rounding."""
    degrees: tuple[int, ...] = ()
    """Power of a common factor by which each column grows: ``of(s * x)[i] == s**degrees[i] * of(x)[i]``. Used to take
    the loss scale of mixed precision out of gradients; empty where no such law holds."""

    of_many: Callable[[list[Tensor]], Tensor] | None = None
    """Optional: many one-tensor observations on one device at once -> ``[observation, column]``."""
    routine: Routine | None = None
    """Optional: the routine of the compiled kernel that does what `of` does."""
    packs: Callable[..., bytes | None] | None = None
    """Optional: does the same as `of`, as packed doubles on the host; None where it cannot."""
    rescale: Callable[[NDArray[np.float64], float], NDArray[np.float64]] | None = None
    """Optional, where no degrees hold: terms and a factor -> terms of the tensors multiplied by it (sums of logs)."""

    def named(self, values: NDArray[np.float64]) -> Columns:
        """Split ``[..., column]`` into one array ``[...]`` per column name."""
        return {name: values[..., i] for i, name in enumerate(self.columns)}

    def rescaled(self, values: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
        """Terms ``[..., column]`` of tensors multiplied by `factor`, from the terms of the tensors themselves."""
        if factor == 1.0:
            return values
        if self.rescale is not None:
            return self.rescale(values, factor)
        return values * np.power(factor, self.degrees) if self.degrees else values


@dataclass(frozen=True, slots=True, eq=False)
class Statistic:
    """One number per observation (or one per entry of `dims`), as a function of terms.

    Example:
        >>> RMS.value(torch.tensor([3.0, 4.0, 0.0, 0.0]))
        2.5
    """

    name: str
    terms: Terms
    finish: Callable[[Columns], NDArray[np.float64]]
    """Named columns ``[...]`` -> values ``[..., *dims]``; NaN where nothing was observed."""
    unit: str
    doc: str
    """One sentence with the formula, stored beside the values."""
    dims: tuple[str, ...] = ()
    coords: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    mergeable: bool = True
    """False: taken from the first observation of a step only, and the run says so."""
    across_ranks: str = ""
    """How values of several ranks combine, see `StatisticSpec.across_ranks`."""
    grows: float = 0.0
    """Power of the number of entries by which it grows over like data: 0.5 for norms, 1 for counts and sums. Each of
    several data-parallel ranks then records what the whole batch would show if it were like its own."""
    extent: Callable[[Columns], NDArray[np.int64]] | None = None
    """Optional, for the one axis in `dims` where only the model knows how many coordinates there are (heads): named
    columns ``[...]`` -> their number. A run keeps as many as the first recorded row has."""

    def value(self, *tensors: Tensor) -> float:
        """The statistic of one observation, for a scalar statistic."""
        with torch.no_grad():
            return float(self.of(self.terms.of(*tensors).cpu().numpy()))

    def of(self, terms: NDArray[np.float64]) -> NDArray[np.float64]:
        """Finish merged terms ``[..., column]``."""
        with np.errstate(all="ignore"):
            return np.asarray(self.finish(self.terms.named(terms)), dtype=np.float64)

    def spec(self) -> StatisticSpec:
        """What is written beside the values in a run file."""
        return StatisticSpec(self.name, self.unit, self.doc, self.dims, self.coords, self.across_ranks)


def additive(name: str, columns: tuple[str, ...], of: Callable[..., Tensor], degrees: tuple[int, ...] = ()) -> Terms:
    """Terms that merge by addition, the easy way to a new statistic.

    Args:
        name: name of the terms.
        columns: one name per entry `of` returns.
        of: tensors -> ``[column]`` float64 sums.
        degrees: see `Terms.degrees`.

    Returns:
        Terms whose merge is the sum.

    Example:
        >>> positive = additive("positive", ("n",), lambda x: (x > 0).sum().double().reshape(1))
        >>> positive.merge(positive.of(torch.tensor([1.0, -1.0])).numpy(), np.array([5.0])).tolist()
        [6.0]
    """
    return Terms(name, columns, of, np.add, degrees)


def _moments_of(tensor: Tensor) -> Tensor:
    """``[count, mean, m2, max_abs, zeros, nonfinite]`` in one pass over cache-sized pieces."""
    vector = stored(tensor)
    place = place_of(vector) if vector.numel() else None
    if place is not None:
        parts = [torch.from_numpy(host_moments(place))]
    else:
        parts = [_piece_moments(piece) for piece in blocks(vector)] if vector.numel() else []
    gap = implicit_zeros(tensor)
    if gap:
        parts.append(vector.new_tensor([gap, 0.0, 0.0, 0.0, gap, 0.0], dtype=torch.float64))
    if not parts:
        return vector.new_zeros(6, dtype=torch.float64)
    return parts[0] if len(parts) == 1 else _join_moments(torch.stack(parts))  # [part, 6] -> [6]


def _piece_moments(x: Tensor) -> Tensor:
    """Moments of one float64 piece, which is overwritten."""
    low, high = torch.aminmax(x)
    count = constant(x.numel(), x.device)
    zeros = count - torch.count_nonzero(x)
    mean = x.mean()
    nonfinite = _nonfinite(x, mean)
    x.sub_(mean)
    return torch.stack([count, mean, torch.dot(x, x), torch.maximum(high, -low), zeros, nonfinite])


def _nonfinite(x: Tensor, mean: Tensor) -> Tensor:
    """Count of NaN and Inf: `x - x` is NaN for exactly those. A finite mean already proves there are none."""
    if mean.device.type == "cpu" and math.isfinite(mean):  # reading a CPU scalar waits for nothing
        return constant(0, x.device)
    return torch.count_nonzero(x - x)


def _join_moments(parts: Tensor) -> Tensor:
    """Chan's update over many parts at once: centred squares plus the spread of the means. ``[part, 6] -> [6]``."""
    count, mean, m2 = parts[:, 0], parts[:, 1], parts[:, 2]
    total = count.sum()
    joint = (count * mean).sum() / total
    spread = (count * (mean - joint).square()).sum()
    return torch.stack([total, joint, m2.sum() + spread, parts[:, 3].amax(), parts[:, 4].sum(), parts[:, 5].sum()])


def _merge_moments(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Chan, Golub and LeVeque (1979): exact union of counts, means and centred squares."""
    with np.errstate(all="ignore"):
        count = a[..., 0] + b[..., 0]
        mean, gap = _joint_mean(a[..., 0], a[..., 1], b[..., 0], b[..., 1])
        m2 = a[..., 2] + b[..., 2] + np.square(gap) * a[..., 0] * (b[..., 0] / np.maximum(count, 1.0))
        rest = np.maximum(a[..., 3], b[..., 3]), a[..., 4] + b[..., 4], a[..., 5] + b[..., 5]
    return np.stack([count, mean, m2, *rest], axis=-1)


def _joint_mean(
    na: NDArray[np.float64], ma: NDArray[np.float64], nb: NDArray[np.float64], mb: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean of a union, and the gap between its parts (0 where one is empty). Inf in one part stays Inf."""
    gap = np.where((na > 0) & (nb > 0), mb - ma, 0.0)
    mean = np.where(na > 0, ma, mb) + gap * (nb / np.maximum(na + nb, 1.0))
    return np.where(np.isfinite(gap), mean, ma + mb), gap


MOMENTS = Terms(
    "moments",
    ("count", "mean", "m2", "max_abs", "zeros", "nonfinite"),
    _moments_of,
    _merge_moments,
    (0, 1, 2, 1, 0, 0),
    routine=Routine.MOMENTS,
)


def _squares_of(tensor: Tensor) -> Tensor:
    """``[count, sum of squares]``, the cheapest pass: for parameters and their gradients."""
    vector = stored(tensor)
    place = place_of(vector)
    if place is not None:
        return torch.tensor([place[1] + implicit_zeros(tensor), host_squares(place)], dtype=torch.float64)
    count = constant(vector.numel() + implicit_zeros(tensor), vector.device)
    squares = [torch.dot(piece, piece) for piece in blocks(vector)]
    return torch.stack([count, squares[0] if len(squares) == 1 else torch.stack(squares).sum()])


def _squares_of_many(tensors: list[Tensor]) -> Tensor:
    """One fused call instead of one per tensor; ``[tensor, (count, sum of squares)]``."""
    vectors = [stored(tensor) for tensor in tensors]
    counts = [vector.numel() + implicit_zeros(tensor) for vector, tensor in zip(vectors, tensors, strict=True)]
    places = [place for vector in vectors if (place := place_of(vector)) is not None]
    if len(places) == len(vectors):
        sums = [(count, host_squares(place)) for count, place in zip(counts, places, strict=True)]
        return torch.tensor(sums, dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(vectors, 2, dtype=torch.float64))  # [tensor]
    return torch.stack([torch.tensor(counts, dtype=torch.float64, device=norms.device), norms.square()], dim=1)


SQUARES = replace(
    additive("squares", ("count", "squares"), _squares_of, degrees=(0, 2)),
    of_many=_squares_of_many,
    routine=Routine.SQUARES,
)


def _powers_of(tensor: Tensor) -> Tensor:
    """``[count, mean, m2, s3, s4]``: the central sums of third and fourth power over the matching power of m2."""
    vector = stored(tensor).double()
    zeros = implicit_zeros(tensor)
    if vector.numel() + zeros == 0:
        return vector.new_zeros(5)
    vector = torch.cat([vector, vector.new_zeros(zeros)]) if zeros else vector
    mean = vector.mean()
    centred = vector - mean
    m2 = torch.dot(centred, centred)
    unit = centred / torch.where(m2 == 0, 1.0, m2.sqrt())  # of length 1, so that no power leaves the range of a float
    square = unit.square()
    return torch.stack(
        [mean.new_full((), vector.numel()), mean, m2, torch.dot(square, unit), torch.dot(square, square)]
    )


def _merge_powers(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Pebay (2008), SAND2008-6212, pairwise update of central sums, in units of the joint m2."""
    na, ma, a2, a3, a4 = np.moveaxis(a, -1, 0)
    nb, mb, b2, b3, b4 = np.moveaxis(b, -1, 0)
    with np.errstate(all="ignore"):
        n = np.maximum(na + nb, 1.0)
        mean, d = _joint_mean(na, ma, nb, mb)
        m2 = a2 + b2 + d**2 * na * nb / n
        length = np.where(m2 == 0, 1.0, np.sqrt(m2))
        ra, rb, d = np.sqrt(a2) / length, np.sqrt(b2) / length, d / length
        a3, b3, a4, b4 = a3 * ra**3, b3 * rb**3, a4 * ra**4, b4 * rb**4
        s3 = a3 + b3 + d**3 * na * nb * (na - nb) / n**2 + 3 * d * (na * rb**2 - nb * ra**2) / n
        s4 = a4 + b4 + d**4 * na * nb * (na**2 - na * nb + nb**2) / n**3
        s4 = s4 + 6 * d**2 * (na**2 * rb**2 + nb**2 * ra**2) / n**2 + 4 * d * (na * b3 - nb * a3) / n
    return np.stack([na + nb, mean, m2, s3, s4], axis=-1)


POWERS = Terms("powers", ("count", "mean", "m2", "s3", "s4"), _powers_of, _merge_powers, (0, 1, 2, 0, 0))


def _per_entry(total: NDArray[np.float64], count: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(count > 0, total / count, np.nan)


def _squared_norm(t: Columns) -> NDArray[np.float64]:
    """Sum of squares from centred moments; an Inf entry gives Inf, a NaN entry NaN."""
    total = t["m2"] + t["count"] * np.square(t["mean"])
    return np.where(np.isinf(t["max_abs"]), np.inf, np.where(np.isnan(t["max_abs"]), np.nan, total))


def _known(t: Columns, values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(t["count"] > 0, values, np.nan)


def _of_moments(
    name: str, finish: Callable[[Columns], NDArray[np.float64]], doc: str, across_ranks: str, grows: float = 0.0
) -> Statistic:
    return Statistic(name, MOMENTS, finish, "1", doc, across_ranks=across_ranks, grows=grows)


MEAN = _of_moments("mean", lambda t: _per_entry(t["mean"] * t["count"], t["count"]), "Mean of the entries.", "mean")
VARIANCE = _of_moments(
    "variance",
    lambda t: _per_entry(t["m2"], t["count"]),
    "Population variance of the entries, mean((x - mean(x))^2).",
    "mean",
)
RMS = _of_moments(
    "rms",
    lambda t: np.sqrt(_per_entry(_squared_norm(t), t["count"])),
    "Root mean square of the entries, sqrt(mean(x^2)).",
    "rms",
)
NORM = _of_moments(
    "norm",
    lambda t: _known(t, np.sqrt(_squared_norm(t))),
    "Euclidean norm of all entries, sqrt(sum(x^2)).",
    "rms",
    grows=0.5,
)
MAX_ABS = _of_moments("max_abs", lambda t: _known(t, t["max_abs"]), "Largest absolute entry.", "max")
ZERO_FRACTION = _of_moments(
    "zero_fraction", lambda t: _per_entry(t["zeros"], t["count"]), "Share of entries that are exactly 0.", "mean"
)
NONFINITE_COUNT = _of_moments(
    "nonfinite_count", lambda t: _known(t, t["nonfinite"]), "Number of NaN and infinite entries.", "mean", grows=1.0
)
KURTOSIS = Statistic(
    "kurtosis",
    POWERS,
    lambda t: np.where(t["m2"] > t["count"] * np.square(_ROUNDING * t["mean"]), t["count"] * t["s4"], np.nan),
    "1",
    "Fourth standardised moment, mean((x - mean(x))^4) / variance^2; 3 for a normal distribution, NaN for a constant.",
)
