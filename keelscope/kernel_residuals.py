"""What the compiled kernel does for residual sub-layers; like `keelscope.kernel`, each gives None without it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelscope import kernel

if TYPE_CHECKING:
    from keelscope._kernel import Flow

__all__ = ["flow", "plain_operands", "residual_gradients", "residual_rows", "residual_sums", "residual_weight"]


_Met = TypeVar("_Met")


def residual_sums(*tensors: Tensor) -> bytes | None:
    """Sums over the operands of a residual sum, see `keelscope_probes.sublayers`.

    Args:
        tensors: stream, shortcut, branch, and flags that are added up.

    Returns:
        Packed columns; None where only torch can read them.
    """
    return None if kernel._native is None else kernel._native.residual_sums(*tensors)


def residual_weight(stream: Tensor, shortcut: Tensor) -> bytes | None:
    """What a shortcut does to squares.

    Args:
        stream: x.
        shortcut: a x.

    Returns:
        Packed 1 and ``|a x|^2 / |x|^2``; None where only torch can read them.
    """
    return None if kernel._native is None else kernel._native.residual_weight(stream, shortcut)


def residual_gradients(*tensors: Tensor) -> bytes | None:
    """Squares of the six gradients around a sub-layer, see `keelscope_probes.sublayers`.

    Args:
        tensors: the gradients.

    Returns:
        Packed columns; None where only torch can read them.
    """
    return None if kernel._native is None else kernel._native.residual_gradients(*tensors)


def residual_rows(
    operands: Sequence[tuple[Tensor, ...]], flags: list[Tensor | None] | None = None
) -> tuple[NDArray[np.float64], list[int]] | None:
    """`residual_sums` of many sub-layers in one call, or `residual_weight` without flags.

    Args:
        operands: stream, shortcut and branch of each.
        flags: of each; None where all are 0.

    Returns:
        ``[sub-layer, column]``, and the places of those that only torch can read; None without the compiled kernel.
    """
    if kernel._native is None:
        return None
    packed, left = kernel._native.residual_rows(flags, list(operands))
    return np.frombuffer(packed).reshape(len(operands), 2 if flags is None else 8), left


def plain_operands(
    kind: Callable[[Tensor, Tensor, Tensor], _Met],
    tensors: list[Tensor],
    wanted: list[tuple[int, int, torch.dtype] | None],
) -> Sequence[_Met | None]:
    """What meets in sums of two tensors of one type and shape.

    Args:
        kind: makes one of stream, shortcut and branch.
        tensors: kept tensors.
        wanted: places of stream and branch and the type of both; None for other sums.

    Returns:
        What meets in each; None where only Python can tell, or without the compiled kernel.
    """
    if kernel._native is None:
        return [None] * len(wanted)
    found: Sequence[_Met | None] = kernel._native.plain_operands(kind, tensors, wanted)
    return found


def flow(owner: weakref.ref[Any], numbers: bytes, streams: int, sublayers: int, *, sums: bool) -> Flow | None:
    """What adds up gradients by the way they came, see `keelscope.paths.flow`.

    Args:
        owner: takes what the kernel does not.
        numbers: the plan, see `keelscope.paths.plan`.
        streams: number of stream tensors.
        sublayers: number of sub-layers.
        sums: whether to take the sums of `residual_gradients`.

    Returns:
        The flow; None without the compiled kernel.
    """
    return None if kernel._native is None else kernel._native.Flow(owner, numbers, streams, sublayers, sums)
