"""Tensors in host memory as arrays of numpy, for machines without the compiled kernel.

A tensor is read where it lies. ``Tensor.numpy()`` would pin its storage for good: nobody could resize it afterwards.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["FLOAT32", "Place", "entries_at", "narrowed", "place_of", "words_at"]

Place = tuple[int, int, np.dtype[np.generic]]
"""Address, number of entries, and their type: 16-bit whole numbers for bfloat16, which numpy does not know."""

FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = np.dtype(np.uint16)
_START, _END = 1 << 12, 1 << 61
# A slice of all memory takes a tenth of the time of an array made for an address. Nothing is read but the slice.
_MEMORY = np.frombuffer(memoryview((ctypes.c_char * (_END - _START)).from_address(_START)), np.uint8)
_EVERYTHING: dict[np.dtype[np.generic], NDArray[np.generic]] = {
    np.dtype(kind): _MEMORY.view(kind) for kind in (np.uint16, np.float16, np.float32, np.float64)
}
_FLOATS, _WORDS = _MEMORY.view(np.float32), _MEMORY.view(np.uint32)
_DTYPES: dict[torch.dtype, np.dtype[np.generic]] = {
    torch.float32: FLOAT32,
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
    first, odd = divmod(address - _START, dtype.itemsize)
    if not odd and first >= 0 and address < _END:
        return _EVERYTHING[dtype][first : first + count]
    if not count:
        return np.empty(0, dtype)
    memory = memoryview((ctypes.c_char * (count * dtype.itemsize)).from_address(address))
    return np.frombuffer(memory, dtype)


def words_at(address: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Entries of type float32, and what they are as whole numbers.

    Args:
        address: see `Place`.
        count: how many.

    Returns:
        ``[entry]`` each.
    """
    first, odd = divmod(address - _START, 4)
    if odd or not 0 <= first < _END >> 3:
        entries = entries_at((address, count, FLOAT32))
        return entries, entries.view(np.uint32)  # type: ignore[return-value]
    return _FLOATS[first : first + count], _WORDS[first : first + count]


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
