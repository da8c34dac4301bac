"""The exact largest singular value of a norm's Jacobian, by counting eigenvalues (inertia) and bisecting.

With D = diag(gamma^2), s^2 J J' = D - W W' where W holds one column ``gamma / sqrt(n)`` for the mean (centred norms)
and one ``sqrt(kappa) gamma u`` for the row's own direction, kappa = rho (2 - rho). By Sylvester's law of inertia the
number of eigenvalues above lambda is

    n_+(D - lambda) + n_+(I - W' (D - lambda)^-1 W) - columns of W,

O(n) per row and step, with no n x n matrix. `closed_forms` has the bound ``max|gamma| / s`` that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keelscope.entries import constant
from keelscope.jacobian.closed_forms import RowGains, row_gains
from keelscope.jacobian.norms import NormForm, fold, folded_gain

__all__ = ["sigma_max", "spectral_rows", "top_singular_values"]

_STEPS = 64
_TINY = 1e-300
_NUDGE = 1e-16
_PIECE = 1 << 18


def sigma_max(form: NormForm, x: Tensor) -> Tensor:
    """Largest singular value of each row's Jacobian.

    Args:
        form: the norm.
        x: an input that it accepts.

    Returns:
        ``[row]`` in float64.

    Example:
        >>> sigma_max(NormForm("rms", gamma=torch.tensor([2.0, 1.0, 1.0]), shape=(3,)), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor([1.7321], dtype=torch.float64)
    """
    return top_singular_values(*spectral_rows(form, x, row_gains(form, x)))


def spectral_rows(form: NormForm, x: Tensor, gains: RowGains) -> tuple[Tensor, ...]:
    """All that the largest singular value depends on, row by row.

    Args:
        form: the norm.
        x: an input that it accepts.
        gains: its gains there.

    Returns:
        Rows ``[row, entry]``, gamma^2 ``[row, width]``, and ``[row]`` each: 1/s, 1 - rho, and 1 for a centred row.
        Where the bound is exact already, it stands for all of them.
    """
    rows = fold(form, x)
    squares = folded_gain(form, form.gamma, x).square()
    lost = 2 if form.centred else 1
    if form.entrywise or squares.shape[1] == 1 or rows.shape[1] <= lost:
        one = torch.ones_like(gains.scale)
        top = gains.sigma_max[:, None]
        return top, top.square(), one, one, torch.zeros_like(one)
    repeated = squares.expand(len(rows) // len(squares), *squares.shape).reshape(len(rows), -1)
    centred = constant(float(form.centred), x.device).expand(len(rows))
    return rows, repeated, gains.scale, gains.epsilon_share, centred


def top_singular_values(rows: Tensor, squares: Tensor, scale: Tensor, share: Tensor, centred: Tensor) -> Tensor:
    """Sigma of each row, by bisection between the interlacing bounds.

    Args:
        rows: see `spectral_rows`, as all others.
        squares: gamma^2.
        scale: 1/s.
        share: 1 - rho.
        centred: 1 or 0.

    Returns:
        ``[row]`` in float64.
    """
    found = []
    step = max(1, _PIECE * len(rows) // max(rows.numel(), 1))
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        pencil = _Pencil.of(rows[piece], squares[piece], 1 - share[piece].square(), centred[piece])
        low, high = pencil.interval()
        for _ in range(_STEPS):
            middle = (low + high) / 2
            above = pencil.count_above(middle) > 0
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        found.append(((low + high) / 2).sqrt() * scale[piece])
    return torch.cat(found) if found else scale.new_zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class _Pencil:
    """D - W W' of each row. Places of a channel share gamma, so that only sums over them count."""

    diagonal: Tensor
    """gamma^2, ``[row, width]``."""
    own: Tensor
    """Squares of the column of the row's direction, ``[row, width]``."""
    mean: Tensor
    """Squares of the column of the mean, 0 without centring, ``[row, width]``."""
    both: Tensor
    """Products of the two columns, ``[row, width]``."""
    places: int

    @classmethod
    def of(cls, rows: Tensor, diagonal: Tensor, kappa: Tensor, centred: Tensor) -> _Pencil:
        wide = rows.to(torch.float64)
        size = rows.shape[1]
        c = wide - wide.mean(1, keepdim=True) * centred[:, None]
        along = c / torch.linalg.vector_norm(c, dim=1, keepdim=True).clamp(min=_TINY)
        along = along.reshape(len(rows), diagonal.shape[1], -1)  # [row, width, place]
        own = diagonal * kappa[:, None] * along.square().sum(2)
        mean = diagonal * centred[:, None] / diagonal.shape[1]
        both = diagonal * (kappa * centred / size).sqrt()[:, None] * along.sum(2)
        return cls(diagonal, own, mean, both, along.shape[2])

    def interval(self) -> tuple[Tensor, Tensor]:
        """Interlacing: of the three largest copies of gamma^2, rank 2 leaves an eigenvalue at or above the smallest."""
        top = self.diagonal.topk(min(3, self.diagonal.shape[1]), dim=1).values
        needed = -(-3 // self.places)
        low = top[:, needed - 1] if needed <= top.shape[1] else torch.zeros_like(top[:, 0])
        return low, top[:, 0]

    def count_above(self, level: Tensor) -> Tensor:
        """Eigenvalues above `level`, ``[row]``."""
        gap = self.diagonal - level[:, None]  # [row, width]
        gap = torch.where(gap == 0, _NUDGE * level[:, None], gap)
        count = self.places * (gap > 0).sum(1)
        inverse = 1 / gap
        first, second = 1 - (self.own * inverse).sum(1), 1 - (self.mean * inverse).sum(1)
        determinant = first * second - (self.both * inverse).sum(1).square()
        positive = torch.where(determinant < 0, 1, torch.where(first + second > 0, 2, 0))
        return count + positive - 2
