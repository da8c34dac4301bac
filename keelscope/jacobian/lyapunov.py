"""Lyapunov exponents of a chain of Jacobians, with products from the top down only.

A stack is a product of Jacobians ``J_L ... J_1``. Its growth rates in different directions come from a frame that is
carried down by the transposed ones and made orthonormal after each (Benettin et al. 1980; QR method, Geist, Parlitz and
Lauterborn 1990). A product and its transpose have the same singular values, hence the same exponents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Generator, Tensor

from keelscope.jacobian.operators import Operator

__all__ = ["carried_down", "lyapunov_exponents", "orthonormal", "random_frame"]


def random_frame(size: int, count: int, generator: Generator, dtype: torch.dtype) -> Tensor:
    """Orthonormal rows in random directions, ``[exponent, entry]``; zero rows beyond the number of entries."""
    drawn = torch.randn(count, size, generator=generator, device=generator.device, dtype=dtype)
    return orthonormal(drawn)[0]


def orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gram-Schmidt, twice, without waiting for the device.

    Args:
        rows: ``[row, entry]``.

    Returns:
        Orthonormal rows, and for each the distance of the given row from the span of those before it (the diagonal of
        R): float64 ``[row]``. A row that is a combination of the others becomes 0.
    """
    frame, lengths = torch.zeros_like(rows), []
    for i, row in enumerate(rows):
        size = torch.linalg.vector_norm(row, dtype=torch.float64)
        rest = row / torch.where(size == 0, 1.0, size).to(row.dtype)
        for _ in range(2):
            rest = rest - (frame[:i] @ rest) @ frame[:i]
        length = torch.linalg.vector_norm(rest, dtype=torch.float64)
        sound = length > 100 * torch.finfo(rows.dtype).eps
        frame[i] = torch.where(sound, rest / length.to(rest.dtype), 0.0)
        lengths.append(torch.where(sound, length * size, 0.0))
    return frame, torch.stack(lengths)


def carried_down(operator: Operator, frame: Tensor) -> tuple[Tensor, Tensor]:
    """A frame passes one Jacobian from above.

    Args:
        operator: J; only `vjp` is used.
        frame: orthonormal rows ``[exponent, output entry]``.

    Returns:
        The frame below ``[exponent, input entry]``, and the growth of each row, log10 of the diagonal of R: float64
        ``[exponent]``, -inf where a direction is lost.
    """
    shaped = (row.to(operator.dtype).reshape(operator.outputs) for row in frame)
    images = torch.stack([operator.vjp(row).reshape(-1).to(frame.dtype) for row in shaped])
    below, lengths = orthonormal(images)
    return below, lengths.log10()


def lyapunov_exponents(operators: Iterable[Operator], count: int, *, generator: Generator) -> Tensor:
    """Leading exponents of a chain, in decades per operator.

    With as many exponents as dimensions their sum is exactly ``log10 |det| / length``. Fewer ones converge to the
    leading ones from below as the chain grows: a random start has a part of 1 / sqrt(d) along the leading direction,
    which costs up to ``log10(sqrt(d)) / length``. On a short chain the first is the growth of a typical direction.

    Args:
        operators: Jacobians from the top down: the one nearest the loss first.
        count: how many.
        generator: on the operators' device.

    Returns:
        float64 ``[count]``, largest first up to that error.

    Example:
        >>> from keelscope.jacobian.operators import matrix_operator
        >>> chain = [matrix_operator(torch.eye(3, dtype=torch.float64) / 10)] * 5
        >>> lyapunov_exponents(chain, 2, generator=Generator().manual_seed(0)).tolist()
        [-1.0, -1.0]
    """
    frame: Tensor | None = None
    growth, length = torch.full((count,), math.nan, dtype=torch.float64), 0
    for operator in operators:
        if frame is None:
            wide = torch.promote_types(operator.dtype, torch.float32)
            frame = random_frame(operator.outputs.numel(), count, generator, wide)
            growth = torch.zeros(count, dtype=torch.float64, device=operator.device)
        frame, gain = carried_down(operator, frame)
        growth, length = growth + gain, length + 1
    return growth / max(length, 1)
