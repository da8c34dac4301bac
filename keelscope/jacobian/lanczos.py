"""Largest singular values of an operator by Golub-Kahan-Lanczos bidiagonalisation.

One product with J and one with J' per step (Golub and Kahan 1965). Both bases are kept and orthogonalised in full,
twice: without that, copies of converged values appear. The products run on the device; the small bidiagonal matrix is
decomposed on the host.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from keelscope.jacobian.operators import Operator

__all__ = ["bidiagonalise", "leading_singular_values", "ritz_values"]


def bidiagonalise(operator: Operator, steps: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """The bidiagonal matrix of ``J V = U B`` and ``J' U = V B' + beta_m v e_m'`` for a random first column of V.

    Args:
        operator: J, with both products.
        steps: m, number of columns of V and U; there are no more than inputs.
        generator: on the operator's device.

    Returns:
        Diagonal ``alpha [step]`` and upper diagonal ``beta [step]`` of B, float64; the last beta is the residual's.
        Zero from where the bases span everything that J reaches.

    Raises:
        ValueError: if the operator has no `jvp`.
    """
    if operator.jvp is None:
        raise ValueError("bidiagonalise needs products with J and with its transpose; this operator has no jvp.")
    wide = torch.promote_types(operator.dtype, torch.float32)
    right = _Basis(operator.inputs.numel(), steps, wide, operator.device)
    left = _Basis(operator.outputs.numel(), steps, wide, operator.device)
    start = torch.randn(operator.inputs.numel(), generator=generator, device=generator.device, dtype=wide)
    v, _ = right.extended(start)
    alphas, betas = [], []
    for _ in range(min(steps, operator.inputs.numel())):
        u, alpha = left.extended(_flat(operator.jvp, v, operator.inputs, operator.dtype))
        v, beta = right.extended(_flat(operator.vjp, u, operator.outputs, operator.dtype))
        alphas.append(alpha)
        betas.append(beta)
    missing = [alphas[0].new_zeros(())] * (steps - len(alphas))
    return torch.stack([*alphas, *missing]), torch.stack([*betas, *missing])


class _Basis:
    """Orthonormal vectors ``[column, entry]``, one more with each call."""

    def __init__(self, size: int, steps: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.zeros(min(steps, size) + 1, size, dtype=dtype, device=device)
        self._scale = torch.zeros((), dtype=torch.float64, device=device)
        self._known = 0

    def extended(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """A vector without its part in the basis, scaled to length 1 and added; and the length that it had.

        Args:
            vector: ``[entry]``.

        Returns:
            The new column, and the length in float64. Both are zero where nothing but rounding is left.
        """
        known = self._rows[: self._known]
        rest = vector.to(known.dtype)
        self._scale = torch.maximum(self._scale, torch.linalg.vector_norm(rest, dtype=torch.float64))
        for _ in range(2):
            rest = rest - known.mT @ (known @ rest)
        length = torch.linalg.vector_norm(rest, dtype=torch.float64)
        sound = length > 100 * torch.finfo(rest.dtype).eps * self._scale
        column = torch.where(sound, rest / length.to(rest.dtype), 0.0)
        if self._known < len(self._rows):
            self._rows[self._known] = column
            self._known += 1
        return column, torch.where(sound, length, 0.0)


def _flat(product: object, vector: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A product on flattened tensors."""
    assert callable(product)
    result = product(vector.to(dtype).reshape(shape))
    assert isinstance(result, Tensor)
    return result.reshape(-1)


def ritz_values(
    alphas: NDArray[np.float64], betas: NDArray[np.float64], count: int = 1
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Estimates of the largest singular values from a bidiagonal matrix.

    Args:
        alphas: diagonal ``[..., step]``.
        betas: upper diagonal ``[..., step]``, the last entry being the residual's.
        count: how many values.

    Returns:
        ``[..., count]`` values, largest first, none above the true one of its rank but for rounding; and
        ``[..., count]`` residuals ``|J' u - sigma v| = beta_m |p_m|``: a true singular value is at most that far away.

    Example:
        >>> values, errors = ritz_values(np.array([3.0, 0.0]), np.array([0.0, 0.0]))
        >>> values.tolist(), errors.tolist()
        ([3.0], [0.0])
    """
    steps = alphas.shape[-1]
    matrix = alphas[..., None] * np.eye(steps) + betas[..., None] * np.eye(steps, k=1)
    left, values, _ = np.linalg.svd(matrix)
    return values[..., :count], (betas[..., -1:] * np.abs(left[..., -1, :]))[..., :count]


def leading_singular_values(
    operator: Operator, count: int = 1, *, steps: int = 20, generator: Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest singular values of an operator.

    Args:
        operator: J, with both products.
        count: how many, at most `steps`.
        steps: one product with J and one with J' each. For a block of Pre-LN or Post-LN 10 give five digits of the
            largest value, for one of Keel, whose values lie close together, 20 give four.
        generator: on the operator's device.

    Returns:
        See `ritz_values`.

    Example:
        >>> from keelscope.jacobian.operators import matrix_operator
        >>> diagonal = matrix_operator(torch.diag(torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)))
        >>> leading_singular_values(diagonal, 2, generator=Generator().manual_seed(0))[0].round(12).tolist()
        [5.0, 2.0]
    """
    alphas, betas = bidiagonalise(operator, min(steps, operator.inputs.numel()), generator)
    return ritz_values(alphas.cpu().numpy(), betas.cpu().numpy(), count)
