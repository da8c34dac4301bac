r"""Residual sub-layers: what the branch adds to the stream, and which of the two ways the gradient takes back.

A sub-layer is ``x' = n(a x + b F(x))`` with n the norm on the sum, or nothing. With g' the gradient at x', the
gradient at x is ``g = a J_n^T g' + J_bF^T J_n^T g'``: the shortcut part and the branch part. All norms are whole-tensor
norms, in the first micro-batch of a step. Formulas: arXiv 2601.19895 and the documentation's page on paths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope import kernel_residuals
from keelscope.entries import constant, local_shard, plainly, stored
from keelscope.jacobian.closed_forms import row_gains
from keelscope.jacobian.recognition import Recogniser
from keelscope.probe import Tap, TensorProbe, Tensors
from keelscope.statistics import Columns, Statistic, additive

__all__ = ["RESIDUAL_GAINS", "RESIDUAL_GRADIENTS", "RESIDUAL_SUMS"]

_EVERY = 10
"""A look at a graph of another shape than before reads all of it: seconds for a thousand sub-layers."""

_recogniser = Recogniser()


def _squares(tensor: Tensor) -> Tensor:
    """Sum of squares in float64."""
    wide = stored(tensor).double()
    return torch.dot(wide, wide)


def _product(left: Tensor, right: Tensor) -> Tensor:
    return torch.dot(stored(left.contiguous()).double(), stored(right.contiguous()).double())


def _sum_terms(stream: Tensor, shortcut: Tensor, branch: Tensor, norm: Tensor) -> Tensor:
    """``[xx, aa, ff, fx, absorbed, moving, entries, has norm]`` of x, a x and b F."""
    total = shortcut + branch
    moving = branch != 0
    absorbed = (total == shortcut) & moving
    return torch.stack(
        [
            _squares(stream),
            _squares(shortcut),
            _squares(branch),
            _product(branch, stream),
            absorbed.sum().double(),
            moving.sum().double(),
            constant(stream.numel(), stream.device),
            norm.sum(),
        ]
    )


_SUM = replace(
    additive("residual_sum", ("xx", "aa", "ff", "fx", "absorbed", "moving", "entries", "norm"), _sum_terms),
    packs=kernel_residuals.residual_sums,
)


def _sum_view(tensors: Tensors, norm: nn.Module) -> Tensors | None:
    stream, shortcut, branch = (local_shard(tensor) for tensor in tensors)
    rows = stream.shape[0] if stream.dim() else 1
    return stream, shortcut, branch, _flags(rows, stream.device, is_up=not isinstance(norm, nn.Identity))


def _sum_rows(
    several: Sequence[Tensors], norms: Sequence[nn.Module]
) -> tuple[NDArray[np.float64], Sequence[int]] | None:
    """`_sum_view` and the terms of many sub-layers."""
    flags = [
        None if isinstance(norm, nn.Identity) else _norm_flags(s[0]) for s, norm in zip(several, norms, strict=True)
    ]
    return kernel_residuals.residual_rows(several, flags)


def _norm_flags(stream: Tensor) -> Tensor:
    return _flags(stream.shape[0] if stream.dim() else 1, stream.device, is_up=True)


@functools.lru_cache(maxsize=64)
def _flags(rows: int, device: torch.device, *, is_up: bool) -> Tensor:
    """Whether a norm is on the sum, one number per row so that observations can be joined."""
    with plainly():
        return torch.full((rows,), float(is_up), dtype=torch.float64, device=device)


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(below > 0, above / below, np.nan)


def _predicted(t: Columns) -> NDArray[np.float64]:
    normed = 0.5 * np.log10(1 + _ratio(t["ff"], t["aa"]))
    plain = -0.5 * np.log10(_ratio(t["aa"], t["xx"]))
    return np.where(t["norm"] > 0, normed, plain)


ALPHA = Statistic(
    "alpha",
    _SUM,
    lambda t: np.sqrt(_ratio(t["aa"], t["xx"])),
    "1",
    "Weight of the shortcut, rms(a x) / rms(x).",
    across_ranks="rms",
)
BRANCH_GAIN = Statistic(
    "branch_gain",
    _SUM,
    lambda t: _ratio(t["ff"], t["xx"]),
    "1",
    "Branch gain v = ms(b F) / ms(x), the mean square of what the branch adds over that of the stream.",
    across_ranks="mean",
)
COSINE = Statistic(
    "cosine",
    _SUM,
    lambda t: _ratio(t["fx"], np.sqrt(t["ff"]) * np.sqrt(t["xx"])),
    "1",
    "Cosine between what the branch adds and the stream, over all entries.",
    across_ranks="mean",
)
PREDICTED_SLOPE = Statistic(
    "predicted_slope",
    _SUM,
    _predicted,
    "decades",
    "What the shortcut should take from the gradient: 1/2 log10(1 + v / alpha^2) where a norm follows the sum, "
    "else -log10(alpha). Exact for a norm without gain on a stream of mean square 1 and an uncorrelated branch.",
    across_ranks="mean",
)
ABSORBED_FRACTION = Statistic(
    "absorbed_fraction",
    _SUM,
    lambda t: _ratio(t["absorbed"], t["moving"]),
    "1",
    "Share of entries that the branch does not change although it adds something: lost to rounding in the sum.",
    across_ranks="mean",
)


def _gain_view(tensors: Tensors, norm: nn.Module) -> Tensors | None:
    """Squared gains ``alpha^2 |J_n|_F^2 / d`` of the rows of the sum; without a norm, what they are taken from."""
    stream, shortcut, branch = (local_shard(tensor) for tensor in tensors)
    if isinstance(norm, nn.Identity):
        return stream, shortcut
    form = _recogniser.form(norm)
    total = shortcut + branch
    if form is None or not form.accepts(total):
        return None
    packed = kernel_residuals.residual_weight(stream, shortcut)
    weight = _squares(shortcut) / _squares(stream) if packed is None else float(np.frombuffer(packed)[1])
    return (weight * row_gains(form, total).squared_gain,)


def _gain_rows(
    several: Sequence[Tensors], norms: Sequence[nn.Module]
) -> tuple[NDArray[np.float64], Sequence[int]] | None:
    """`_gain_view` and the terms of many sub-layers; those with a norm are left out."""
    found = kernel_residuals.residual_rows(several)
    if found is None:
        return None
    normed = [i for i, norm in enumerate(norms) if not isinstance(norm, nn.Identity)]
    return found[0], sorted({*found[1], *normed}) if normed else found[1]


def _gain_terms(first: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """``[rows, gain]`` from the squared gains of all rows; or from x and a x, one row, where no norm is on the sum."""
    gains = first if shortcut is None else (_squares(shortcut) / _squares(first)).reshape(1)
    return torch.stack([constant(gains.numel(), gains.device), gains.double().sum()])


def _packed_gains(first: Tensor, shortcut: Tensor | None = None) -> bytes | None:
    if shortcut is not None:
        return kernel_residuals.residual_weight(first, shortcut)
    if first.dtype != torch.float64 or not first.is_cpu:
        return None
    return np.array([first.numel(), first.numpy().sum()]).tobytes()


_GAIN = replace(additive("shortcut_gain", ("rows", "gain"), _gain_terms), packs=_packed_gains)
SHORTCUT_GAIN = Statistic(
    "shortcut_gain",
    _GAIN,
    lambda t: np.sqrt(_ratio(t["gain"], t["rows"])),
    "1",
    "Gain of the shortcut, alpha |J_n|_F / sqrt(d), root mean square over tokens; alpha where no norm is on the sum.",
    across_ranks="rms",
)


_WAYS = ("leaving", "total", "shortcut", "branch", "entering", "shortcut_only")


def _gradient_terms(*gradients: Tensor) -> Tensor:
    """Squares and numbers of entries of the six gradients, and the product of shortcut and branch part."""
    counts = [constant(gradient.numel(), gradient.device) for gradient in gradients]
    return torch.stack([*map(_squares, gradients), *counts, _product(gradients[2], gradients[3])])


_GRADIENTS = replace(
    additive(
        "residual_gradients",
        (*_WAYS, *(f"{way}_entries" for way in _WAYS), "product"),
        _gradient_terms,
        degrees=(2,) * 6 + (0,) * 6 + (2,),
    ),
    packs=kernel_residuals.residual_gradients,
)


def _norm(name: str, way: str, doc: str) -> Statistic:
    def finish(t: Columns) -> NDArray[np.float64]:
        return np.sqrt(np.where(t[f"{way}_entries"] > 0, t[way], np.nan))

    return Statistic(name, _GRADIENTS, finish, "1", doc, across_ranks="rms", grows=0.5)


def _path_cosine(t: Columns) -> NDArray[np.float64]:
    return _ratio(t["product"], np.sqrt(t["shortcut"]) * np.sqrt(t["branch"]))


_NORMS = (
    _norm("output_gradient", "leaving", "Norm of the gradient g' at the stream after."),
    _norm("sum_gradient", "total", "Norm of the gradient at the sum, J_n^T g'."),
    _norm(
        "shortcut_part",
        "shortcut",
        "Norm of the part of the gradient at the entering stream that came along the shortcut, a J_n^T g'.",
    ),
    _norm(
        "branch_part",
        "branch",
        "Norm of the part of the gradient at the entering stream that came through the branch.",
    ),
    _norm("input_gradient", "entering", "Norm of the gradient g at the entering stream."),
    _norm(
        "shortcut_only_gradient",
        "shortcut_only",
        "Norm of what shortcuts alone carry from the top of the stack to the entering stream: the gradient of the same "
        "model with its branches detached.",
    ),
)
PATH_COSINE = Statistic(
    "path_cosine",
    _GRADIENTS,
    _path_cosine,
    "1",
    "Cosine between shortcut part and branch part of the gradient.",
    across_ranks="mean",
)

RESIDUAL_SUMS = TensorProbe(
    "residual_sums",
    Tap.RESIDUAL_SUM,
    statistics=(ALPHA, BRANCH_GAIN, COSINE, PREDICTED_SLOPE, ABSORBED_FRACTION),
    group="sublayers",
    every=_EVERY,
    views=_sum_view,
    together=_sum_rows,
)
RESIDUAL_GAINS = TensorProbe(
    "residual_gains",
    Tap.RESIDUAL_SUM,
    statistics=(SHORTCUT_GAIN,),
    group="sublayers",
    every=_EVERY,
    views=_gain_view,
    together=_gain_rows,
)
RESIDUAL_GRADIENTS = TensorProbe(
    "residual_gradients",
    Tap.RESIDUAL_GRADIENTS,
    statistics=(*_NORMS, PATH_COSINE),
    group="sublayers",
    every=_EVERY,
)
