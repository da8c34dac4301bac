"""Linear operators given by products, and the Frobenius norm of one from random products.

`keelscope.jacobian.linearised` gives the products of a module's Jacobian on a live graph; `lanczos` and `lyapunov`
build on what is here. Results of `frobenius` and `leading_singular_values` are read to the host, all else stays on the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

__all__ = ["Operator", "frobenius", "matrix_operator", "relative_squares", "signs"]


@dataclass(frozen=True, slots=True)
class Operator:
    """A linear map J from tensors of one shape to tensors of another."""

    vjp: Callable[[Tensor], Tensor]
    """``J' u``: ``[*output]`` -> ``[*input]``."""
    inputs: torch.Size
    outputs: torch.Size
    dtype: torch.dtype
    """Of what `vjp` takes."""
    device: torch.device
    jvp: Callable[[Tensor], Tensor] | None = None
    """``J v``: ``[*input]`` -> ``[*output]``; None where only `vjp` is known."""


def matrix_operator(matrix: Tensor) -> Operator:
    """The operator of an explicit matrix.

    Args:
        matrix: ``[output, input]``.

    Returns:
        The operator, with both products.

    Example:
        >>> matrix_operator(torch.tensor([[1.0, 2.0]])).vjp(torch.tensor([3.0])).tolist()
        [3.0, 6.0]
    """
    rows, columns = matrix.shape
    return Operator(
        lambda u: matrix.mT @ u,
        torch.Size([columns]),
        torch.Size([rows]),
        matrix.dtype,
        matrix.device,
        jvp=lambda v: matrix @ v,
    )


def signs(shape: torch.Size, generator: Generator, dtype: torch.dtype) -> Tensor:
    """A Rademacher tensor: independent entries, +1 or -1 with equal probability, on the generator's device."""
    drawn = torch.randint(0, 2, shape, generator=generator, device=generator.device, dtype=torch.int8)
    return drawn.mul_(2).sub_(1).to(dtype)


def relative_squares(operator: Operator, probes: int, generator: Generator) -> Tensor:
    """Independent unbiased estimates of ``|J|_F^2 / inputs``, one product each.

    For r with independent entries +-1, ``E |J' r|^2 = tr(J J') = |J|_F^2`` (Hutchinson 1989), with the variance
    ``2 (|J J'|_F^2 - sum_i (J J')_ii^2)``; normal entries have the larger ``2 |J J'|_F^2``.

    Args:
        operator: J.
        probes: number of estimates.
        generator: on the operator's device.

    Returns:
        ``[probe]`` float64.
    """
    squares = []
    for _ in range(probes):
        product = operator.vjp(signs(operator.outputs, generator, operator.dtype))
        squares.append(torch.linalg.vector_norm(product, dtype=torch.float64).square())
    return torch.stack(squares) / operator.inputs.numel()


def frobenius(operator: Operator, probes: int = 8, *, generator: Generator) -> tuple[float, float]:
    """Frobenius norm of an operator and the standard error of the estimate.

    Args:
        operator: J.
        probes: number of products ``J' r`` with random signs r, at least 2.
        generator: on the operator's device.

    Returns:
        ``|J|_F = sqrt(m)`` with m the mean of ``|J' r|^2``, and ``s / (2 |J|_F sqrt(n))`` with s their standard
        deviation (delta method).

    Example:
        >>> frobenius(matrix_operator(torch.diag(torch.tensor([3.0, 4.0]))), generator=Generator().manual_seed(0))
        (5.0, 0.0)
    """
    squares = relative_squares(operator, probes, generator).cpu() * operator.inputs.numel()  # [probe]
    norm = math.sqrt(float(squares.mean()))
    error = float(squares.std()) / math.sqrt(probes)
    return norm, error / (2 * norm) if norm else 0.0
