"""Tensors in host memory as arrays of numpy, for machines without the compiled kernel.

A tensor is read where it lies. ``Tensor.numpy()`` would pin its storage for good: nobody could resize it afterwards.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["Place", "entries_at", "narrowed", "place_of"]

Place = tuple[int, int, np.dtype[np.generic]]
"""Address, number of entries, and their type: 16-bit whole numbers for bfloat16, which numpy does not know."""

_BFLOAT16 = np.dtype(np.uint16)
_DTYPES: dict[torch.dtype, np.dtype[np.generic]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: _BFLOAT16,
}


def place_of(tensor: Tensor) -> Place | None:
    """Where the entries of a tensor lie, for as long as the tensor is there and nobody resizes it.

    Args:
        tensor: any tensor.

    Returns:
        Its place; None where its entries do not lie as they read, one after the other in host memory.
    """
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter:
        return None
    if tensor.layout is not torch.strided or not tensor.is_cpu:
        return None
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or not tensor.is_contiguous() or tensor.is_neg():
        return None
    count, address = tensor.numel(), tensor.data_ptr()
    return (address, count, dtype) if address or not count else None


def entries_at(place: Place) -> NDArray[np.generic]:
    """The entries at a place, without copying them.

    Args:
        place: of a tensor that outlives the array.

    Returns:
        ``[entry]``.
    """
    address, count, dtype = place
    if not count:
        return np.empty(0, dtype)
    memory = memoryview((ctypes.c_char * (count * dtype.itemsize)).from_address(address))
    return np.frombuffer(memory, dtype)


def narrowed(raw: NDArray[np.generic]) -> NDArray[np.floating]:
    """Entries as numpy can compare them fast: float64 as it is, all others in float32.

    Args:
        raw: as they lie at a place.

    Returns:
        As many.
    """
    if raw.dtype == _BFLOAT16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32) if raw.dtype == np.float16 else raw  # type: ignore[return-value]
