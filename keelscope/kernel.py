"""The compiled kernel: one pass over a tensor in host memory, without any torch operation.

It reads contiguous tensors of four types; for every other tensor, and where it was not built, these functions give None
and the torch operations of `keelscope.statistics` do the same work. ``KEELSCOPE_KERNEL=torch`` in the environment turns
it off. Its source is ``native/kernel.c``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["SWITCH", "Program", "Routine", "is_compiled", "measure", "measure_all", "program"]

SWITCH = "KEELSCOPE_KERNEL"
"""The environment variable; ``torch`` means the torch operations."""

Program = tuple[object, ...]
"""What to take from a tensor: key, routine, key, routine, ..."""
_Key = TypeVar("_Key")


class Routine(IntEnum):
    """What the kernel can take from a tensor, as packed doubles."""

    MOMENTS = 0
    """``count, mean, m2, max_abs, zeros, nonfinite``, as in `keelscope.statistics.MOMENTS`."""
    SQUARES = 1
    """``count, sum of squares``."""
    LATE_TOKENS = 2
    """Over the later half of positions of ``[batch, position, feature]``: ``sum of log10 norms, tokens above 0, at 0``.
    Squares of float64 below 1e-308 are 0."""


def _load() -> Any:
    if os.environ.get(SWITCH, "") == "torch":
        return None
    try:
        native = importlib.import_module("keelscope._kernel")
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        native.prepare(Tensor, torch.nn.Parameter, torch.strided, *dtypes)
    except (ImportError, AttributeError):
        return None
    return native


_native = _load()


def is_compiled() -> bool:
    """Whether the compiled kernel is there and on."""
    return _native is not None


def program(wanted: Iterable[tuple[_Key, Routine]]) -> Program:
    """Keys and routines in the form that `measure` takes.

    Args:
        wanted: what to take from a tensor, and under which key.

    Returns:
        The program.
    """
    return tuple(part for key, routine in wanted for part in (key, int(routine)))


def measure(steps: Program, tensor: Tensor) -> dict[Any, bytes] | None:
    """Run a program over a tensor.

    Args:
        steps: made by `program`.
        tensor: any tensor.

    Returns:
        Key -> packed doubles; None where only torch can read the tensor.

    Example:
        >>> import numpy as np
        >>> found = measure(program([("m", Routine.MOMENTS)]), torch.tensor([1.0, 0.0, -4.0]))
        >>> found is None or np.frombuffer(found["m"]).tolist() == [3.0, -1.0, 14.0, 4.0, 1.0, 0.0]
        True
    """
    return None if _native is None else _native.measure(steps, tensor)


def measure_all(routine: Routine, tensors: list[Tensor]) -> list[bytes | None]:
    """Run one routine over many tensors, in one call.

    Args:
        routine: the routine.
        tensors: any tensors.

    Returns:
        Packed doubles of each; None where only torch can read the tensor.
    """
    return [None] * len(tensors) if _native is None else _native.measure_all(routine, tensors)
