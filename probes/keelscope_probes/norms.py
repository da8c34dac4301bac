"""What normalisation layers do to a gradient on its way back: exact Jacobian gains per token, and the gain measured.

Norms are found by behaviour, their Jacobians come in closed form (`keelscope.jacobian`). A token is a row of
the norm: for GroupNorm a group of channels of one sample, for BatchNorm a channel over the batch.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope.entries import constant, local_shard, plainly
from keelscope.jacobian.closed_forms import row_gains, transported_squares
from keelscope.jacobian.recognition import Recogniser
from keelscope.jacobian.spectrum import spectral_rows, top_singular_values
from keelscope.kernel import Routine
from keelscope.probe import Tap, TensorProbe, Tensors
from keelscope.statistics import Columns, Statistic, Terms, additive

__all__ = ["NORMS", "NORM_SPECTRUM", "NORM_TRANSPORT"]

QUANTILES = (0.1, 0.5, 0.9)
_EVERY = 10
"""Gains move as slowly as the weights, and cost as much as everything else together: each tenth recorded step."""
_TOGETHER = 256  # sites whose histograms are looked at at once: of a thousand layers they would be many copies of 6 MB
_OCTAVE = 8
_RANGE = 24
_BINS = 2 * _RANGE * _OCTAVE + 2
"""Eight per octave between 2^-24 and 2^24; the first and the last bin hold what lies below and above."""

_recogniser = Recogniser()


def _row_view(tensors: Tensors, module: nn.Module) -> Tensors | None:
    """Gains of each row."""
    x = local_shard(tensors[0])
    form = _recogniser.form(module)
    if form is None or not form.accepts(x):
        return None
    return (row_gains(form, x).table,)


@np.errstate(all="ignore")  # Inf and NaN in a tensor are recorded, not warned about
def _spectral_view(tensors: Tensors, module: nn.Module) -> Tensors | None:
    """What the largest singular value of each row depends on."""
    x = local_shard(tensors[0])
    form = _recogniser.form(module)
    return None if form is None or not form.accepts(x) else spectral_rows(form, x, row_gains(form, x))


def _rows_of(gains: Tensor) -> Tensor:
    """``[rows, largest sigma, sums over the columns of the gains]``."""
    return torch.cat([_count_and_largest(gains[:, 1]), gains.sum(0)])


def _count_and_largest(values: Tensor) -> Tensor:
    """``[number, largest value]``; 0 of nothing."""
    largest = values.amax() if len(values) else values.new_zeros(())
    return torch.stack([constant(len(values), values.device), largest])


def _merge_rows(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    merged = a + b
    merged[..., 1] = np.maximum(a[..., 1], b[..., 1])
    return merged


_ROWS = Terms(
    "norm_rows",
    ("rows", "sigma", "gain", "_", "share", "input", "gamma", "scale"),
    _rows_of,
    _merge_rows,
    routine=Routine.GAIN_SUMS,
)


def _histogram_of(gains: Tensor) -> Tensor:
    """Rows by their gain, ``[bin]``; a gain that is no number counts as above the range."""
    one = constant(1.0, gains.device)
    bins = torch.bucketize(gains[:, 0].contiguous(), _edges(gains.device))
    return gains.new_zeros(_BINS).index_add_(0, bins, one.expand(bins.shape))


@functools.lru_cache(maxsize=16)
def _edges(device: torch.device) -> Tensor:
    """Squared gains between the bins."""
    with plainly():
        steps = torch.arange(-_RANGE * _OCTAVE, _RANGE * _OCTAVE + 1, dtype=torch.float64, device=device)
        return torch.exp2(2 / _OCTAVE * steps)


_HISTOGRAM = replace(
    additive("norm_gain_histogram", tuple(f"bin_{i}" for i in range(_BINS)), _histogram_of),
    routine=Routine.GAIN_COUNTS,
)


def _quantiles(t: Columns) -> NDArray[np.float64]:
    """Gains below which given shares of the rows lie, ``[..., quantile]``; interpolated in log2 inside a bin."""
    columns = list(t.values())
    columns = columns if columns[0].ndim else [column[None] for column in columns]
    starts = range(0, max(1, len(columns[0])), _TOGETHER)
    parts = [_quantiles_of(np.array([column[at : at + _TOGETHER] for column in columns]).T) for at in starts]
    return np.concatenate(parts).reshape(*next(iter(t.values())).shape, len(QUANTILES))


def _quantiles_of(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[site, quantile]`` of counts ``[site, bin]``."""
    below = np.cumsum(counts, axis=-1)
    total = below[:, -1:]
    wanted = np.array(QUANTILES) * total  # [site, quantile]
    bin_ = np.argmax(below[:, None] >= wanted[..., None], axis=-1)  # [site, quantile]
    inside = np.take_along_axis(counts, bin_, -1)
    before = np.take_along_axis(below, bin_, -1) - inside
    log2 = (bin_ - _BINS // 2 + (wanted - before) / inside) / _OCTAVE
    value = np.where(bin_ == 0, 0.0, np.where(bin_ == _BINS - 1, np.inf, np.exp2(log2)))
    return np.where(total > 0, value, np.nan)


def _sigma_of(*view: Tensor) -> Tensor:
    """``[rows, largest sigma]``."""
    return _count_and_largest(top_singular_values(*view))


_SIGMA = Terms(
    "norm_sigma",
    ("rows", "sigma"),
    _sigma_of,
    lambda a, b: np.stack([a[..., 0] + b[..., 0], np.maximum(a[..., 1], b[..., 1])], axis=-1),
)


def _mean(column: str) -> Callable[[Columns], NDArray[np.float64]]:
    return lambda t: np.where(t["rows"] > 0, t[column] / t["rows"], np.nan)


def _root_mean(column: str) -> Callable[[Columns], NDArray[np.float64]]:
    return lambda t: np.sqrt(np.where(t["rows"] > 0, t[column] / t["rows"], np.nan))


def _largest(t: Columns) -> NDArray[np.float64]:
    return np.where(t["rows"] > 0, t["sigma"], np.nan)


def _transport_view(tensors: Tensors, module: nn.Module) -> Tensors | None:
    """``|J' g|^2`` and ``|g|^2`` of each row."""
    x, gradient = map(local_shard, tensors)
    form = _recogniser.form(module)
    if form is None or not form.accepts(x) or x.shape != gradient.shape or gradient.layout is not torch.strided:
        return None
    return transported_squares(form, x, gradient)


def _packed_sums(after: Tensor, before: Tensor) -> bytes | None:
    """The same as `_TRANSPORT` of tensors in host memory, where two numbers need no tensor of their own."""
    if type(after) is not Tensor or not after.is_cpu:
        return None
    return array("d", (after.sum().item(), before.sum().item())).tobytes()


_TRANSPORT = replace(
    additive(
        "norm_transport", ("after", "before"), lambda after, before: torch.stack([after.sum(), before.sum()]), (2, 2)
    ),
    packs=_packed_sums,
)

JACOBIAN_GAIN = Statistic(
    "jacobian_gain",
    _ROWS,
    _root_mean("gain"),
    "1",
    "Frobenius norm of the norm's Jacobian over sqrt(d), root mean square over tokens: the factor on a gradient "
    "without preferred direction.",
    across_ranks="rms",
)
JACOBIAN_GAIN_QUANTILE = Statistic(
    "jacobian_gain_quantile",
    _HISTOGRAM,
    _quantiles,
    "1",
    "Frobenius norm of the norm's Jacobian over sqrt(d), quantiles over tokens from a histogram of 8 bins per octave.",
    dims=("quantile",),
    coords={"quantile": QUANTILES},
)
SIGMA_MAX = Statistic(
    "sigma_max",
    _ROWS,
    _largest,
    "1",
    "Bound max|gamma| / s on the largest singular value of the norm's Jacobian, largest over tokens.",
    across_ranks="max",
)
SIGMA_MAX_EXACT = Statistic(
    "sigma_max_exact",
    _SIGMA,
    _largest,
    "1",
    "Largest singular value of the norm's Jacobian, largest over tokens, by inertia bisection.",
    across_ranks="max",
)
INPUT_RMS = Statistic(
    "input_rms", _ROWS, _root_mean("input"), "1", "Root mean square of the norm's input.", across_ranks="rms"
)
EPSILON_SHARE = Statistic(
    "epsilon_share",
    _ROWS,
    _mean("share"),
    "1",
    "Share of epsilon in the scale, eps / (m + eps), mean over tokens: how much of a gradient along the token passes.",
    across_ranks="mean",
)
GAMMA_RMS = Statistic(
    "gamma_rms", _ROWS, _root_mean("gamma"), "1", "Root mean square of the norm's gain gamma.", across_ranks="rms"
)
MEASURED_GAIN = Statistic(
    "measured_gain",
    _TRANSPORT,
    lambda t: np.sqrt(np.where(t["before"] > 0, t["after"] / t["before"], np.nan)),
    "1",
    "Norm of the gradient at the norm's input over that at its output, |J'g| / |g|, as this step's gradient passed it.",
    across_ranks="rms",
)

NORMS = TensorProbe(
    "norms",
    Tap.INPUT,
    statistics=(JACOBIAN_GAIN, JACOBIAN_GAIN_QUANTILE, SIGMA_MAX, INPUT_RMS, EPSILON_SHARE, GAMMA_RMS),
    every=_EVERY,
    chooses=_recogniser.knows,
    views=_row_view,
)
NORM_SPECTRUM = TensorProbe(
    "norm_spectrum",
    Tap.INPUT,
    statistics=(),
    optional=(SIGMA_MAX_EXACT,),
    group="norms",
    every=_EVERY,
    chooses=_recogniser.knows,
    views=_spectral_view,
)
NORM_TRANSPORT = TensorProbe(
    "norm_transport",
    Tap.INPUT_AND_GRADIENT,
    statistics=(MEASURED_GAIN,),
    group="norms",
    every=_EVERY,
    chooses=_recogniser.knows,
    views=_transport_view,
)
