"""How blocks change what passes them: Frobenius gain, largest singular value and Lyapunov exponents of Jacobians.

Of the whole input of a block, all samples and positions, on the graph of the step itself (`keelscope.jacobian`). Each
product with a Jacobian costs the better part of a backward pass of the block, so nothing of this is on by default.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope.jacobian.lanczos import bidiagonalise, ritz_values
from keelscope.jacobian.lyapunov import carried_down, random_frame
from keelscope.jacobian.operators import relative_squares
from keelscope.jacobian.passage import Passage
from keelscope.probe import JacobianProbe, Tensors
from keelscope.statistics import MOMENTS, Columns, Statistic, Terms, additive

__all__ = ["JACOBIANS", "JACOBIAN_SPECTRUM", "LYAPUNOV", "Products"]

_EVERY = 20
"""Jacobians move as slowly as the weights: each twentieth recorded step."""
_STEPS = 16
_EXPONENTS = 4


@dataclass(frozen=True, slots=True)
class Products:
    """Estimates of ``|J|_F^2 / inputs`` from random signs; use `n` others with ``replace(JACOBIANS, measures=...)``."""

    n: int = 4

    def __call__(self, passage: Passage, _: nn.Module) -> Tensors:
        """One estimate per product, ``[probe]``."""
        return (relative_squares(passage.operator, self.n, passage.generator),)


def _gain(t: Columns) -> NDArray[np.float64]:
    return np.sqrt(np.where(t["count"] > 0, t["mean"], np.nan))


def _gain_error(t: Columns) -> NDArray[np.float64]:
    """Standard error of the mean square, and from it that of its root."""
    n = t["count"]
    error = np.sqrt(np.where(n > 1, t["m2"] / (n * (n - 1)), np.nan))
    return np.where(error == 0, 0.0, error / (2 * _gain(t)))


FROBENIUS_GAIN = Statistic(
    "frobenius_gain",
    MOMENTS,
    _gain,
    "1",
    "Frobenius norm of the block's Jacobian over sqrt(inputs), |J|_F / sqrt(d), from products J'r with random signs r.",
    across_ranks="rms",
)
FROBENIUS_ERROR = Statistic(
    "frobenius_error",
    MOMENTS,
    _gain_error,
    "1",
    "Standard error of frobenius_gain, from the spread of its products and of the micro-batches of the step.",
    across_ranks="max",
)


def _bidiagonal(passage: Passage, _: nn.Module) -> Tensors:
    """Both diagonals of the Lanczos matrix, ``[1, step]`` each."""
    alphas, betas = bidiagonalise(passage.operator, _STEPS, passage.generator)
    return alphas[None], betas[None]


def _largest_of(alphas: Tensor, betas: Tensor) -> Tensor:
    """``[alpha..., beta...]``; zeros of nothing."""
    rows = torch.cat([alphas, betas], dim=1)  # [row, 2 step]
    return rows[0] if len(rows) else rows.new_zeros(2 * _STEPS)


def _sigma_and_error(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sigma, error = ritz_values(values[..., :_STEPS], values[..., _STEPS:])
    return sigma[..., 0], error[..., 0]


def _merge_largest(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    keep = _sigma_and_error(a)[0] >= _sigma_and_error(b)[0]
    return np.where(keep[..., None], a, b)


_BIDIAGONAL = Terms(
    "lanczos",
    tuple(f"{name}_{i}" for name in ("alpha", "beta") for i in range(_STEPS)),
    _largest_of,
    _merge_largest,
)


def _from_columns(which: int, t: Columns) -> NDArray[np.float64]:
    return _sigma_and_error(np.stack(list(t.values()), axis=-1))[which]


SIGMA_MAX = Statistic(
    "sigma_max",
    _BIDIAGONAL,
    lambda t: _from_columns(0, t),
    "1",
    "Largest singular value of the block's Jacobian over all samples, from below, by Golub-Kahan-Lanczos.",
    across_ranks="max",
)
SIGMA_ERROR = Statistic(
    "sigma_error",
    _BIDIAGONAL,
    lambda t: _from_columns(1, t),
    "1",
    "Residual |J'u - sigma v| of sigma_max: a singular value is at most that far away.",
    across_ranks="max",
)


@dataclass(frozen=True, slots=True)
class _Chain:
    """A frame on its way down a stack."""

    frame: Tensor
    growth: Tensor
    length: int


def _exponents(passage: Passage, _: nn.Module) -> Tensors:
    """Mean growth of each direction from the top of the chain to the entry of this block, ``[1, exponent]``."""
    operator, name = passage.operator, LYAPUNOV.name
    above = passage.carried(name)
    if not isinstance(above, _Chain) or above.frame.shape[1] != operator.outputs.numel():
        wide = torch.promote_types(operator.dtype, torch.float32)
        frame = random_frame(operator.outputs.numel(), _EXPONENTS, passage.generator, wide)
        above = _Chain(frame, torch.zeros(_EXPONENTS, dtype=torch.float64, device=operator.device), 0)
    frame, growth = carried_down(operator, above.frame)
    here = _Chain(frame, above.growth + growth, above.length + 1)
    passage.leave(name, here)
    return (here.growth[None] / here.length,)


def _sums_of(exponents: Tensor) -> Tensor:
    """``[number, sum of each]``."""
    return torch.cat([exponents.new_full((1,), len(exponents)), exponents.sum(0)])


def _mean_exponents(t: Columns) -> NDArray[np.float64]:
    number, *sums = t.values()
    return np.where(number[..., None] > 0, np.stack(sums, axis=-1) / number[..., None], np.nan)


EXPONENTS = Statistic(
    "lyapunov",
    additive("lyapunov_sums", ("number", *(f"exponent_{i}" for i in range(_EXPONENTS))), _sums_of),
    _mean_exponents,
    "decades",
    "Lyapunov exponents of the blocks from here to the top, mean log10 growth per block of a frame carried down from "
    "random directions: the value at the lowest block is that of the stack.",
    dims=("exponent",),
    coords={"exponent": tuple(float(i + 1) for i in range(_EXPONENTS))},
    across_ranks="mean",
)

JACOBIANS = JacobianProbe("jacobians", Products(), (FROBENIUS_GAIN, FROBENIUS_ERROR), every=_EVERY)
JACOBIAN_SPECTRUM = JacobianProbe(
    "jacobian_spectrum",
    _bidiagonal,
    statistics=(),
    optional=(SIGMA_MAX, SIGMA_ERROR),
    group="jacobians",
    every=_EVERY,
    forward_products=True,
)
LYAPUNOV = JacobianProbe("lyapunov", _exponents, statistics=(), optional=(EXPONENTS,), group="jacobians", every=_EVERY)
