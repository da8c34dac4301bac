"""The exact largest singular value of a norm's Jacobian, by counting eigenvalues (inertia) and bisecting.

With D = diag(gamma^2), s^2 J J' = D - W W' where W holds one column ``gamma / sqrt(n)`` for the mean (centred norms)
and one ``sqrt(kappa) gamma u`` for the row's own direction, kappa = rho (2 - rho). By Sylvester's law of inertia the
number of eigenvalues above lambda is

    n_+(D - lambda) + n_+(I - W' (D - lambda)^-1 W) - columns of W,

O(n) per row and step, with no n x n matrix. `keelscope.jacobian` has the bound ``max|gamma| / s`` that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keelscope.jacobian import row_gains, row_pieces
from keelscope.norms import NormForm, fold, folded_gain, row_scale

__all__ = ["sigma_max"]

_STEPS = 64
_TINY = 1e-300
_NUDGE = 1e-16


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
    bound = row_gains(form, x).sigma_max
    rows = fold(form, x)
    gamma = folded_gain(form, form.gamma, rows)
    lost = 2 if form.centred else 1
    if form.entrywise or rows.shape[2] * rows.shape[3] <= lost or gamma.shape[1] == 1:
        return bound
    parts = [_bisected(form, piece, part, x.dtype) for piece, part, _ in row_pieces(rows, gamma)]
    return torch.cat(parts)


def _bisected(form: NormForm, rows: Tensor, gamma: Tensor, dtype: torch.dtype) -> Tensor:
    """Sigma of one piece of rows, by bisection between the interlacing bounds."""
    c = rows.to(torch.float64)
    c = c - c.mean((2, 3), keepdim=True) if form.centred else c
    m = c.square().mean((2, 3))  # [batch, repeat]
    scale, share = row_scale(form, m, rows.shape[2] * rows.shape[3], dtype)
    pencil = _Pencil.of(c, m, gamma.square(), 1 - share.square(), centred=form.centred)
    low, high = pencil.interval()
    for _ in range(_STEPS):
        middle = (low + high) / 2
        above = pencil.count_above(middle) > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (((low + high) / 2).sqrt() * scale).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class _Pencil:
    """D - W W' of every row. Places of a channel share gamma, so that only sums over them count."""

    diagonal: Tensor
    """gamma^2, ``[repeat, width]``."""
    own: Tensor
    """Squares of the column of the row's direction, ``[batch, repeat, width]``."""
    mean: Tensor | None
    """Squares of the column of the mean, ``[repeat, width]``."""
    both: Tensor
    """Products of the two columns, ``[batch, repeat, width]``."""
    places: int

    @classmethod
    def of(cls, c: Tensor, m: Tensor, diagonal: Tensor, kappa: Tensor, *, centred: bool) -> _Pencil:
        size = c.shape[2] * c.shape[3]
        length = (size * m.clamp(min=_TINY))[..., None]  # |c|^2
        own = diagonal * kappa[..., None] * c.square().sum(3) / length
        both = diagonal * (kappa[..., None] / length / size).sqrt() * c.sum(3)
        return cls(diagonal, own, diagonal * c.shape[3] / size if centred else None, both, c.shape[3])

    def interval(self) -> tuple[Tensor, Tensor]:
        """Interlacing: rank + 1 copies of gamma^2, the largest ones, leave an eigenvalue at or above the smallest."""
        top = self.diagonal.sort(dim=1, descending=True).values
        needed = -(-(2 if self.mean is None else 3) // self.places)
        low = top[:, needed - 1] if needed <= top.shape[1] else torch.zeros_like(top[:, 0])
        shape = self.own.shape[:2]
        return low.expand(shape), top[:, 0].expand(shape)

    def count_above(self, level: Tensor) -> Tensor:
        """Eigenvalues above `level`, ``[batch, repeat]``."""
        gap = self.diagonal - level[..., None]  # [batch, repeat, width]
        gap = torch.where(gap == 0, _NUDGE * level[..., None], gap)
        inverse = 1 / gap
        count = self.places * (gap > 0).sum(2)
        first = 1 - (self.own * inverse).sum(2)
        if self.mean is None:
            return count + (first > 0).long() - 1
        second = 1 - (self.mean * inverse).sum(2)
        determinant = first * second - (self.both * inverse).sum(2).square()
        positive = torch.where(determinant < 0, 1, torch.where(first + second > 0, 2, 0))
        return count + positive - 2
