r"""Closed forms of norm Jacobians: Frobenius gain, spectral bound and vector-Jacobian products, O(n) per row.

With the words of `keelscope.norms`, u = c / |c|, rho = d log s / d log sqrt(m) and P = I - 11'/n (or I without
centring), the Jacobian of one row of n entries is

    J = diag(gamma) (P - rho u u') / s = diag(gamma) (Q + (1 - rho) u u') / s,    Q = P - u u',

a projection that forgets the mean and, up to epsilon, the length of the row. Nothing n x n is ever formed. For
BatchNorm in training a row is a channel over the whole batch, so J couples samples and channels do not meet.
`keelscope.spectrum` has the exact largest singular value.

Sources: Xiong et al., arXiv 2002.04745, Lemma 3 (|J| = O(sqrt(d) / |x|)); Chen et al., arXiv 2601.19895, Eq. 9.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keelscope.norms import NormForm, fold, folded_gain, row_scale, running_scale, unfold

__all__ = ["RowGains", "frobenius_gain", "row_gains", "row_pieces", "transported_squares", "vector_jacobian"]

_CACHED_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 24
_TINY = 1e-300
"""Stands in for a mean square of 0, whose row has no direction."""

Piece = tuple[Tensor, Tensor, Tensor]
"""Rows ``[batch, repeat, width, place]``, their gain ``[repeat, width]``, and a second tensor like the rows."""


@dataclass(frozen=True, slots=True, eq=False)
class RowGains:
    """What a norm does to a gradient on its way back, ``[row]`` in float64.

    A row of an entry-wise norm is a token (DyT) or a channel (BatchNorm in evaluation).
    """

    squared_gain: Tensor
    """``|J|_F^2 / n``: mean factor on the square of a gradient without preferred direction."""
    sigma_max: Tensor
    """Bound ``max|gamma| / s`` of the largest singular value; exact for constant gamma and for a diagonal J."""
    epsilon_share: Tensor
    """``1 - rho``: what is left of a gradient along the row itself, relative to one across it; 0 without epsilon."""
    mean_square: Tensor
    """Mean of x^2 over the row, before the mean is taken away."""


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
    rows = fold(form, x)
    gamma = folded_gain(form, form.gamma, rows)
    if form.kind == "batch_eval":
        _, scale, share = running_scale(form, x.dtype)
        factor = (gamma[:, 0] * scale).abs()
        return RowGains(
            factor.square(), factor, share, torch.cat([_mean_square(p) for p, _, _ in row_pieces(rows, gamma)])
        )
    of = _tanh_gains if form.kind == "dyt" else _row_norm_gains
    parts = [of(form, piece, part, x.dtype) for piece, part, _ in row_pieces(rows, gamma)]
    return RowGains(*parts[0]) if len(parts) == 1 else RowGains(*map(torch.cat, zip(*parts, strict=True)))


def row_pieces(rows: Tensor, gamma: Tensor, second: Tensor | None = None) -> Iterator[Piece]:
    """Whole rows in pieces that fit the processor's cache, with what belongs to them.

    Args:
        rows: ``[batch, repeat, width, place]``, see `keelscope.norms.fold`.
        gamma: ``[repeat, width]``, with 1 for a repeat or width that does not matter.
        second: like `rows`, e.g. a gradient.

    Yields:
        Views of the three; rows come in their order over (batch, repeat).
    """
    second = rows if second is None else second
    limit = _CACHED_PIECE if rows.is_cpu else _DEVICE_PIECE
    if rows.numel() <= limit:
        yield rows, gamma, second
        return
    axis = 0 if rows.shape[0] > 1 else 1
    step = max(1, limit * rows.shape[axis] // rows.numel())
    for start in range(0, rows.shape[axis], step):
        length = min(step, rows.shape[axis] - start)
        part = gamma.narrow(0, start, length) if axis == 1 and gamma.shape[0] > 1 else gamma
        yield rows.narrow(axis, start, length), part, second.narrow(axis, start, length)


def _row_norm_gains(form: NormForm, rows: Tensor, gamma: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The fields of `RowGains` for one piece."""
    size, lost = _sizes(form, rows)
    squares = gamma.square()  # [repeat, width]
    mean, m, weighted = _moments(rows, squares, centred=form.centred)  # [batch, repeat]
    scale, share = row_scale(form, m, size, dtype)
    power = squares.mean(1).expand_as(m)
    if size > lost:
        along = weighted / m.clamp(min=_TINY)  # u' gamma^2 u
        inside = torch.addcmul(power * (size - lost + 1), 1 - share.square(), along, value=-1).clamp_(min=0)
        top = gamma.abs().amax(1) * scale
    else:
        inside = share.square() * power * (size == lost)
        top = share * power.sqrt() * scale * (size == lost)
    squared_gain = inside * scale.square() / size
    mean_square = m if mean is None else m + mean.square()
    return squared_gain.reshape(-1), top.reshape(-1), share.reshape(-1), mean_square.reshape(-1)


def _sizes(form: NormForm, rows: Tensor) -> tuple[int, int]:
    """Entries in a row, and how many directions a row norm takes from it."""
    return rows.shape[2] * rows.shape[3], 2 if form.centred else 1


def _moments(rows: Tensor, weights: Tensor, *, centred: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """``[batch, repeat]`` each: mean, mean square of the centred row, and its mean square weighted."""
    wide = rows.to(torch.float64)
    mean = wide.mean((2, 3)) if centred else None
    squares = wide.square() if mean is None else (wide - mean[..., None, None]).square_()
    squares = squares[..., 0] if rows.shape[3] == 1 else squares.mean(3)  # [batch, repeat, width]
    m = squares.mean(2)
    if weights.shape[1] == 1:
        return mean, m, m * weights[:, 0]
    if rows.shape[1] == 1:
        return mean, m, torch.mv(squares[:, 0], weights[0] / rows.shape[2])[:, None]
    return mean, m, (squares * weights).mean(2)


def _tanh_gains(form: NormForm, rows: Tensor, _gamma: Tensor, _dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The fields of `RowGains` for one piece of DyT's input."""
    slopes = _tanh_slopes(form, rows)
    top = slopes.abs().amax((1, 2, 3))
    return slopes.square().mean((1, 2, 3)), top, torch.zeros_like(top), _mean_square(rows)


def _mean_square(rows: Tensor) -> Tensor:
    return rows.to(torch.float64).square().mean((2, 3)).reshape(-1)


def _tanh_slopes(form: NormForm, rows: Tensor) -> Tensor:
    """The diagonal ``gamma a (1 - tanh(a x)^2)`` of DyT's Jacobian, like `rows`."""
    slope, gamma = (folded_gain(form, t, rows)[..., None] for t in (form.slope, form.gamma))
    return gamma * slope * (1 - torch.tanh(slope * rows.to(torch.float64)).square())


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
        >>> x, g = torch.tensor([[1.0, 5.0]]), torch.tensor([[1.0, 0.0]])
        >>> vector_jacobian(NormForm("layer", shape=(2,)), x, g).tolist()
        [[0.0, 0.0]]
    """
    rows, through = fold(form, x), fold(form, gradient).to(dtype)
    if form.kind == "batch_eval":
        result = through * (folded_gain(form, form.gamma, rows) * running_scale(form, x.dtype)[1][:, None])[..., None]
    elif form.kind == "dyt":
        result = through * _tanh_slopes(form, rows)
    else:
        gamma = folded_gain(form, form.gamma, rows).to(dtype)
        result = _row_product(form, rows.to(dtype), through * gamma[..., None], x.dtype)
    return unfold(form, result, gradient).to(gradient.dtype)


def _row_product(form: NormForm, rows: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """``(P - rho u u') g / s`` over folded rows."""
    size, lost = _sizes(form, rows)
    if form.centred:
        rows = rows - rows.mean((2, 3), keepdim=True)
        gradient = gradient - gradient.mean((2, 3), keepdim=True)
    m = rows.square().mean((2, 3), keepdim=True)  # [batch, repeat, 1, 1]
    scale, share = row_scale(form, m, size, dtype)
    if size <= lost:
        return gradient * (scale * share * (size == lost))
    inner = (rows * gradient).mean((2, 3), keepdim=True)
    return (gradient - rows * ((1 - share) * inner / m.clamp(min=torch.finfo(m.dtype).tiny))) * scale


def transported_squares(form: NormForm, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """``|J' g|^2`` and ``|g|^2`` of each row; the square root of the ratio of their sums is the measured gain.

    Args:
        form: the norm.
        x: its input.
        gradient: with respect to its output, like `x`.

    Returns:
        Two tensors ``[row]`` in float64.
    """
    if form.entrywise:
        rows, through = fold(form, vector_jacobian(form, x, gradient.to(torch.float64))), fold(form, gradient)
        return _square_sum(rows), _square_sum(through)
    rows, through = fold(form, x), fold(form, gradient)
    after, before = [], []
    for piece, gamma, g in row_pieces(rows, folded_gain(form, form.gamma, rows), through):
        wide = g.to(torch.float64)
        before.append(_square_sum(wide))
        after.append(_square_after(form, piece, wide * gamma[..., None], x.dtype).reshape(-1))
    return torch.cat(after), torch.cat(before)


def _square_sum(rows: Tensor) -> Tensor:
    return rows.to(torch.float64).square().sum((2, 3)).reshape(-1)


def _square_after(form: NormForm, rows: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """``|J' g|^2`` from ``gamma g``, ``[batch, repeat]``."""
    size, lost = _sizes(form, rows)
    wide = rows.to(torch.float64)
    if form.centred:
        wide = wide - wide.mean((2, 3), keepdim=True)
        gradient = gradient - gradient.mean((2, 3), keepdim=True)
    m = wide.square().mean((2, 3))
    scale, share = row_scale(form, m, size, dtype)
    power = gradient.square().sum((2, 3))
    if size <= lost:
        return power * (share * scale).square() * (size == lost)
    along = (wide * gradient).sum((2, 3)).square() / (size * m.clamp(min=_TINY))
    return torch.addcmul(power, 1 - share.square(), along, value=-1).clamp_(min=0) * scale.square()
