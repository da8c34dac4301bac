r"""Closed forms of norm Jacobians: Frobenius gain, spectral bound and vector-Jacobian products, O(n) per row.

With the words of `norms`, u = c / |c|, rho = d log s / d log sqrt(m) and P = I - 11'/n (or I without
centring), the Jacobian of one row of n entries is

    J = diag(gamma) (P - rho u u') / s = diag(gamma) (Q + (1 - rho) u u') / s,    Q = P - u u',

a projection that forgets the mean and, up to epsilon, the length of the row. Nothing n x n is ever formed. For
BatchNorm in training a row is a channel over the whole batch, so J couples samples and channels do not meet.
`spectrum` has the exact largest singular value.

Sources: Xiong et al., arXiv 2002.04745, Lemma 3 (|J| = O(sqrt(d) / |x|)); Chen et al., arXiv 2601.19895, Eq. 9.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from keelscope import kernel
from keelscope.entries import constant
from keelscope.jacobian.norms import (
    NormForm,
    Numbers,
    fold,
    folded_gain,
    kernel_form,
    row_scale,
    running_scale,
    times,
    unfold,
)
from keelscope.jacobian.rowsums import TINY, in_pieces, numbers, over_rows, square_sum, tensor, weighted

__all__ = ["RowGains", "frobenius_gain", "row_gains", "transported_squares", "vector_jacobian"]


@dataclass(frozen=True, slots=True, eq=False)
class RowGains:
    """What a norm does to a gradient on its way back, per row.

    A row of an entry-wise norm is a token (DyT) or a channel (BatchNorm in evaluation).
    """

    table: Tensor
    """``[row, 6]`` in float64, one column per property."""

    @property
    def squared_gain(self) -> Tensor:
        """``|J|_F^2 / n``: mean factor on the square of a gradient without preferred direction."""
        return self.table[:, 0]

    @property
    def sigma_max(self) -> Tensor:
        """Bound ``max|gamma| / s`` of the largest singular value; exact for constant gamma and for a diagonal J."""
        return self.table[:, 1]

    @property
    def epsilon_share(self) -> Tensor:
        """``1 - rho``: what is left of a gradient along the row, relative to one across it; 0 without epsilon."""
        return self.table[:, 2]

    @property
    def mean_square(self) -> Tensor:
        """Mean of x^2 over the row, before the mean is taken away."""
        return self.table[:, 3]

    @property
    def gamma_square(self) -> Tensor:
        """Mean of gamma^2 over the row."""
        return self.table[:, 4]

    @property
    def scale(self) -> Tensor:
        """``1 / s``; 1 for DyT, which has no scale."""
        return self.table[:, 5]

    @classmethod
    def of(cls, *columns: Numbers) -> RowGains:
        """The table of six columns ``[row]``, or single numbers, the first of which is whole."""
        if isinstance(columns[0], Tensor):
            return cls(torch.stack([column.expand_as(columns[0]) for column in columns], 1))
        table = np.empty((columns[0].size, len(columns)))
        for i, column in enumerate(columns):
            table[:, i] = column
        return cls(torch.from_numpy(table))


def frobenius_gain(form: NormForm, x: Tensor) -> Tensor:
    """``|J|_F / sqrt(n)`` of each row.

    Args:
        form: the norm.
        x: an input that it accepts.

    Returns:
        ``[row]`` in float64.

    Example:
        >>> frobenius_gain(NormForm("rms", shape=(2,)), torch.tensor([[3.0, 4.0], [30.0, 40.0]])).tolist()
        [0.2, 0.02]
    """
    return row_gains(form, x).squared_gain.sqrt()


def row_gains(form: NormForm, x: Tensor) -> RowGains:
    """Every gain of every row, from one pass over the input.

    Args:
        form: the norm.
        x: an input that it accepts.

    Returns:
        Gains, one per row.
    """
    plain = kernel_form(form, x)
    packed = None if plain is None else kernel.norm_gains(x, *plain)
    if packed is not None:
        return RowGains(torch.frombuffer(packed, dtype=torch.float64).reshape(-1, 6))
    rows = fold(form, x.detach())
    squares = folded_gain(form, form.gamma, x).square()  # [repeat, width]
    if form.kind == "batch_eval":
        _, scale, share = running_scale(form, x.dtype)
        power = squares[:, 0].expand_as(scale)
        squared = power * scale.square()
        return RowGains.of(squared, squared.sqrt(), share, _mean_square(rows), power, scale)
    if form.kind == "dyt":
        return _tanh_gains(form, rows, squares)
    return _row_norm_gains(form, rows, squares, x.dtype)


@np.errstate(all="ignore")
def _row_norm_gains(form: NormForm, rows: Tensor, squares: Tensor, dtype: torch.dtype) -> RowGains:
    """Gains of a row norm, with gamma^2 ``[repeat, width]``."""
    size, lost = rows.shape[1], _lost(form)
    peak, power = (numbers(over_rows(t, rows)) for t in (squares.amax(1), squares.mean(1)))  # [row] or [1]
    mean, total, gained = map(numbers, _moments(rows, squares, centred=form.centred))  # [row]
    m = total / size
    scale, share = row_scale(form, m, size, dtype)
    if size > lost:
        along = gained / (total + TINY)  # u' gamma^2 u
        inside = (power * (size - lost + 1) - along * (1 - share * share)).clip(0)
        top = scale * peak**0.5
    else:
        inside = share * share * power * (size == lost)
        top = share * scale * power**0.5 * (size == lost)
    return RowGains.of(inside * (scale * scale / size), top, share, m + mean * mean, power, scale)


def _lost(form: NormForm) -> int:
    """How many directions a row norm takes from a row, up to epsilon."""
    return 2 if form.centred else 1


def _moments(rows: Tensor, weights: Tensor, *, centred: bool) -> tuple[Tensor, ...]:
    """``[row]`` each: mean (0 unless centred), sum of squares of the centred row, and their weighted sum."""
    return in_pieces(_centred_moments if centred else _plain_moments, rows, rows, weights)


def _plain_moments(rows: Tensor, _: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    squares = rows.to(torch.float64, copy=True).square_()
    total = squares.sum(1)
    return torch.zeros_like(total), total, weighted(squares, weights)


def _centred_moments(rows: Tensor, _: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    wide = rows.to(torch.float64, copy=True)
    mean = wide.mean(1)
    squares = wide.sub_(mean[:, None]).square_()
    return mean, squares.sum(1), weighted(squares, weights)


def _mean_square(rows: Tensor) -> Tensor:
    """Mean of the squares of each row."""
    return _moments(rows, constant(1.0, rows.device).reshape(1, 1), centred=False)[1] / rows.shape[1]


def _tanh_gains(form: NormForm, rows: Tensor, squares: Tensor) -> RowGains:
    """Gains of DyT."""

    def sums(piece: Tensor, _: Tensor, __: Tensor) -> tuple[Tensor, ...]:
        slopes = _tanh_slopes(form, piece).square_()
        return slopes.mean(1), slopes.amax(1)

    gain, top = in_pieces(sums, rows, rows, squares)
    zero = torch.zeros_like(gain)
    return RowGains.of(gain, top.sqrt(), zero, _mean_square(rows), squares.mean(), zero + 1)


def _tanh_slopes(form: NormForm, rows: Tensor) -> Tensor:
    """The diagonal ``gamma a (1 - tanh(a x)^2)`` of DyT's Jacobian, like `rows`."""
    slope, gamma = (folded_gain(form, t, rows) for t in (form.slope, form.gamma))
    decay = 1 - torch.tanh(times(rows.to(torch.float64), slope)).square()
    return times(decay, gamma * slope)


def vector_jacobian(form: NormForm, x: Tensor, gradient: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """``J' g``: the gradient at a norm's input, from the one at its output.

    ``(g~ - [mean(g~)] - u rho (u' g~)) / s`` with ``g~ = gamma g``; the bracket belongs to centred norms.

    Args:
        form: the norm.
        x: its input.
        gradient: with respect to its output, like `x`.
        dtype: type to compute in; short rows need float64, since next to nothing is left of their gradient.

    Returns:
        Like `gradient`.

    Example:
        >>> vector_jacobian(NormForm("rms", shape=(2,)), torch.ones(1, 2), torch.tensor([[1.0, 0.0]])).tolist()
        [[0.5, -0.5]]
    """
    rows, through = fold(form, x), fold(form, gradient).to(dtype)  # [row, entry]
    gamma = folded_gain(form, form.gamma, x)
    if form.kind == "batch_eval":
        result = through * (gamma * running_scale(form, x.dtype)[1][:, None]).to(dtype)
    elif form.kind == "dyt":
        result = through * _tanh_slopes(form, rows).to(dtype)
    else:
        result = _row_product(form, rows.to(dtype), times(through, gamma.to(dtype)), x.dtype)
    return unfold(form, result, gradient).to(gradient.dtype)


def _row_product(form: NormForm, rows: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """``(P - rho u u') g / s`` of each row."""
    size, lost = rows.shape[1], _lost(form)
    if form.centred:
        rows = rows - rows.mean(1, keepdim=True)
        gradient = gradient - gradient.mean(1, keepdim=True)
    m = rows.square().mean(1, keepdim=True)  # [row, 1]
    scale, share = row_scale(form, m, size, dtype)
    if size <= lost:
        left: Tensor = gradient * (scale * share * (size == lost))
        return left
    inner = (rows * gradient).mean(1, keepdim=True)
    along = rows * ((1 - share) * inner / m.clamp(min=torch.finfo(m.dtype).tiny))
    result: Tensor = scale * (gradient - along)
    return result


def transported_squares(form: NormForm, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """``|J' g|^2`` and ``|g|^2`` of each row; the square root of the ratio of their sums is the measured gain.

    Args:
        form: the norm.
        x: its input.
        gradient: with respect to its output, like `x`.

    Returns:
        Two tensors ``[row]`` in float64.
    """
    plain = kernel_form(form, x)
    packed = None if plain is None else kernel.norm_transport(x, gradient, *plain)
    if packed is not None:
        both = torch.frombuffer(packed, dtype=torch.float64).reshape(2, -1)
        return both[0], both[1]
    return _transported(form, x, gradient)


@np.errstate(all="ignore")
def _transported(form: NormForm, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    rows, through = fold(form, x.detach()), fold(form, gradient.detach())
    if form.entrywise:
        after = fold(form, vector_jacobian(form, x, gradient.to(torch.float64)))
        return square_sum(after), square_sum(through.to(torch.float64))
    size, lost, gamma = rows.shape[1], _lost(form), folded_gain(form, form.gamma, x)
    sums = functools.partial(_products, centred=form.centred)
    before, power, inner, total = map(numbers, in_pieces(sums, rows, through, gamma))
    scale, share = row_scale(form, total / size, size, x.dtype)
    if size > lost:
        after = (power - inner * inner / (total + TINY) * (1 - share * share)).clip(0) * (scale * scale)
    else:
        after = power * (share * scale) ** 2 * (size == lost)
    return tensor(after), tensor(before)


def _products(rows: Tensor, through: Tensor, gamma: Tensor, *, centred: bool) -> tuple[Tensor, ...]:
    """``[row]`` each: ``|g|^2``, ``|P gamma g|^2``, ``c' gamma g`` and ``|c|^2``."""
    c, g = rows.to(torch.float64, copy=True), through.to(torch.float64)
    if centred:
        c.sub_(c.mean(1, keepdim=True))
    gained = times(g, gamma)
    power = square_sum(gained)
    if centred:
        shift = gained.sum(1)
        power.addcmul_(shift, shift, value=-1 / rows.shape[1])
    total = square_sum(c)
    return square_sum(g), power, c.mul_(gained).sum(1), total
