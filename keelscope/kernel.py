"""The compiled kernel: one pass over a tensor in host memory, without any torch operation.

It knows contiguous tensors of four types; for every other tensor, and where it was not built, these functions give
None and the torch operations of `keelscope.statistics` do the same work. ``KEELSCOPE_KERNEL=torch`` in the environment
turns it off.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["SWITCH", "is_compiled", "late_tokens", "moments", "squares"]

SWITCH = "KEELSCOPE_KERNEL"
"""The environment variable; ``torch`` means the torch operations."""

_PAIR = 16
_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def _load() -> ModuleType | None:
    if os.environ.get(SWITCH, "") == "torch":
        return None
    try:
        return importlib.import_module("keelscope._kernel")
    except ImportError:
        return None


_native: Any = _load()


def is_compiled() -> bool:
    """Whether the compiled kernel is there and on."""
    return _native is not None


def moments(tensor: Tensor) -> bytes | None:
    """Count, mean, centred squares, largest magnitude, zeros and non-finite entries.

    Args:
        tensor: any tensor.

    Returns:
        ``[count, mean, m2, max_abs, zeros, nonfinite]`` as packed doubles, as `keelscope.statistics.MOMENTS` has them;
        None where only torch knows.

    Example:
        >>> import numpy as np
        >>> packed = moments(torch.tensor([1.0, 0.0, -4.0]))
        >>> packed is None or np.frombuffer(packed).tolist() == [3.0, -1.0, 14.0, 4.0, 1.0, 0.0]
        True
    """
    place = _place(tensor)
    return None if place is None else _native.moments(*place)


def squares(tensors: Sequence[Tensor]) -> list[bytes | None]:
    """Count and sum of squares of many tensors, in one call.

    Args:
        tensors: any tensors.

    Returns:
        ``[count, sum of squares]`` of each as packed doubles; None where only torch knows.
    """
    places = [_place(tensor) for tensor in tensors]
    known = [place for place in places if place is not None]
    packed = _native.squares(*chain.from_iterable(known)) if known else b""
    pairs = (packed[start : start + _PAIR] for start in range(0, len(packed), _PAIR))
    return [None if place is None else next(pairs) for place in places]


def late_tokens(tensor: Tensor) -> bytes | None:
    """Norms of the tokens in the later half of positions.

    Args:
        tensor: ``[batch, position, feature]``.

    Returns:
        ``[sum of log10 norms, tokens above 0, tokens at 0]`` as packed doubles; None where only torch knows.
    """
    place = _place(tensor)
    if place is None or tensor.dim() != 3 or place[2] == 0:
        return None
    return _native.late_tokens(place[0], place[1], *tensor.shape)  # type: ignore[no-any-return]


def _place(tensor: Tensor) -> tuple[int, int, int] | None:
    """Address, kind and number of entries of a tensor that lies in host memory as it reads."""
    if _native is None or type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.is_cpu:
        return None
    kind = _KINDS.get(tensor.dtype)
    if kind is None or not tensor.is_contiguous() or tensor.is_neg():
        return None
    count = tensor.numel()
    address = tensor.data_ptr()
    return (address, kind, count) if address or not count else None  # tensors of zeros that torch never wrote


_PLAIN = frozenset({Tensor, torch.nn.Parameter})
