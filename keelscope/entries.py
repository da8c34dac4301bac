"""Any tensor as a flat vector of wide real numbers, so that statistics need not know about dtypes and layouts.

`keelscope.statistics` reduces what this module returns; nothing else looks at sparse, nested, complex or low-precision
tensors. Half-precision sums overflow at 65504 and float32 squares underflow below 1e-23, hence float64 throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "blocks",
    "constant",
    "implicit_zeros",
    "is_measurable",
    "is_unsummed",
    "local_shard",
    "on_this_rank",
    "plainly",
    "stored",
]

_CACHED_BLOCK = 1 << 18
_DEVICE_BLOCK = 1 << 24


def is_measurable(tensor: Tensor) -> bool:
    """Whether the tensor holds real or complex numbers that can be reduced here.

    Args:
        tensor: any tensor.

    Returns:
        False for integer, boolean, quantised, meta and fake tensors, for sums that the ranks have not added up yet, and
        inside functorch transforms.

    Example:
        >>> is_measurable(torch.ones(2)), is_measurable(torch.ones(2, dtype=torch.int64))
        (True, False)
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta:
        return False
    if type(tensor) is not Tensor and (hasattr(tensor, "fake_mode") or is_unsummed(tensor)):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def stored(tensor: Tensor) -> Tensor:
    """The stored entries as one strided real vector, without copying where torch allows it.

    A complex entry counts as two reals, so ``sum(x**2)`` is the squared modulus. Sparse tensors are coalesced first:
    duplicate indices add up before anything is squared. Nested tensors give the entries of all components.

    Args:
        tensor: a measurable tensor of any layout.

    Returns:
        ``[entry]``, in the tensor's own (real) dtype.

    Example:
        >>> stored(torch.tensor([3 + 4j])).tolist()
        [3.0, 4.0]
    """
    if type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_complex()):
        return tensor.reshape(-1) if tensor.is_contiguous() else _in_storage_order(tensor)
    return _stored_otherwise(local_shard(tensor.detach()))


def _stored_otherwise(values: Tensor) -> Tensor:
    """`stored` for layouts and dtypes that need work, and for tensor subclasses."""
    if values.layout != torch.strided and not values.is_nested:
        values = values.coalesce().values() if values.layout == torch.sparse_coo else values.values().clone()
    if values.is_nested:
        values = torch.cat([part.reshape(-1) for part in values.unbind()] or [values.values()])
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.reshape(-1) if values.is_contiguous() else _in_storage_order(values)


def local_shard(tensor: Tensor) -> Tensor:
    """The part of a distributed tensor that lies on this rank; every other tensor as it is."""
    if type(tensor) is Tensor:
        return tensor
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_this_rank(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """What lies here of tensors that may be distributed, so that nothing done with them waits for other ranks.

    Args:
        tensors: any tensors.

    Returns:
        Ordinary tensors; None if one is a sum that the ranks have not added up yet.
    """
    if all(type(tensor) is Tensor for tensor in tensors):
        return tensors
    return None if any(map(is_unsummed, tensors)) else tuple(map(local_shard, tensors))


def is_unsummed(tensor: Tensor) -> bool:
    """Whether a distributed tensor is the sum of what lies on the ranks."""
    return any(placement.is_partial() for placement in getattr(tensor, "placements", ()))


def implicit_zeros(tensor: Tensor) -> int:
    """Number of entries a sparse tensor does not store; 0 for every other layout."""
    if tensor.layout is torch.strided or tensor.is_nested or tensor.layout == torch.jagged:
        return 0
    width = 2 if tensor.is_complex() else 1
    return width * tensor.numel() - stored(tensor).numel()


def blocks(vector: Tensor) -> Iterator[Tensor]:
    """The vector in float64 pieces that fit the processor's cache, each safe to overwrite.

    Args:
        vector: ``[entry]`` of any real floating dtype.

    Yields:
        ``[<= block]`` in float64, never sharing memory with `vector`.
    """
    size = _CACHED_BLOCK if vector.is_cpu else _DEVICE_BLOCK
    if vector.numel() <= size:
        yield vector.to(torch.float64, copy=True)
    else:
        yield from (piece.to(torch.float64, copy=True) for piece in torch.split(vector, size))


@functools.lru_cache(maxsize=1024)
def constant(value: float, device: torch.device) -> Tensor:
    """A float64 scalar on a device, made once: counts repeat from call to call."""
    with plainly():
        return torch.tensor(value, dtype=torch.float64, device=device)


@contextmanager
def plainly() -> Iterator[None]:
    """Make ordinary tensors, also inside inference mode or a mode that makes fake ones: for what is kept."""
    with _disable_current_modes(), torch.inference_mode(mode=False):
        yield


def _in_storage_order(values: Tensor) -> Tensor:
    """Dense permuted tensors are read as they lie in memory; only gaps force a copy."""
    strides = values.stride()
    order = sorted(range(values.dim()), key=lambda axis: -strides[axis])
    return values.permute(order).reshape(-1)
