"""Sums over tensors in host memory, in numpy: an operation on few entries costs a third of one of torch.

`keelscope.statistics` uses it where the compiled kernel is not there; torch operations do the rest.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["host_entries", "host_moments", "host_squares"]

_BLOCK = 1 << 16
_DTYPES = frozenset({torch.float32, torch.float64, torch.float16})


def host_entries(tensor: Tensor) -> NDArray[np.floating] | None:
    """A tensor as an array on the same memory.

    Args:
        tensor: any tensor.

    Returns:
        Like the tensor; None where numpy cannot read it.

    Example:
        >>> host_entries(torch.ones(2)).tolist(), host_entries(torch.ones(2, dtype=torch.bfloat16))
        ([1.0, 1.0], None)
    """
    if not tensor.is_cpu or tensor.dtype not in _DTYPES or type(tensor) is not Tensor or tensor.is_neg():
        return None
    try:
        found: NDArray[np.floating] = tensor.detach().numpy()
    except (RuntimeError, TypeError):  # no memory behind it, as of a tensor of zeros that was never written
        return None
    return found


def host_moments(entries: NDArray[np.floating]) -> NDArray[np.float64]:
    """Moments of pieces, see `keelscope.statistics.MOMENTS`.

    Args:
        entries: ``[entry]``, at least one.

    Returns:
        ``[piece, 6]``, to be joined.
    """
    with np.errstate(all="ignore"):
        return np.array([_moments(entries[at : at + _BLOCK]) for at in range(0, len(entries), _BLOCK)])


def _moments(piece: NDArray[np.floating]) -> tuple[float, ...]:
    wide = piece.astype(np.float64)
    top = np.maximum(wide.max(), -wide.min())
    mean = np.add.reduce(wide) / len(wide)
    zeros = len(wide) - np.count_nonzero(wide)
    nonfinite = 0 if np.isfinite(mean) else len(wide) - np.count_nonzero(np.isfinite(wide))
    wide -= mean
    return len(wide), float(mean), float(wide.dot(wide)), float(top), float(zeros), float(nonfinite)


def host_squares(entries: NDArray[np.floating]) -> float:
    """Sum of the squares of all entries, ``[entry]``, in float64."""
    total = 0.0
    with np.errstate(all="ignore"):
        for at in range(0, len(entries), _BLOCK):
            wide = entries[at : at + _BLOCK].astype(np.float64, copy=False)
            total += float(wide.dot(wide))
    return total
