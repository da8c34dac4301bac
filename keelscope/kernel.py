"""The compiled kernel: one pass over a tensor in host memory, without any torch operation.

It reads contiguous tensors of four types; for every other tensor, and where it was not built, these functions give None
and the torch operations of `keelscope.statistics` do the same work. ``KEELSCOPE_KERNEL=torch`` in the environment turns
it off. Its source is ``native/``; `page` and `passes` make the hooks that it takes over from Python in ordinary calls.
"""

from __future__ import annotations

import importlib
import os
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

if TYPE_CHECKING:
    from keelscope._kernel import Page, Passes
    from keelscope.unwinding import Breaks

__all__ = [
    "COLUMNS",
    "SWITCH",
    "Program",
    "Routine",
    "are_identities",
    "identities",
    "is_compiled",
    "is_tree",
    "measure",
    "measure_all",
    "norm_gains",
    "norm_transport",
    "pack_all",
    "page",
    "passes",
    "program",
    "tree_of",
]

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
    GAIN_SUMS = 3
    """Over the rows of gains, see `keelscope.jacobian.closed_forms`: ``rows, largest sigma, sum of each column``."""
    GAIN_COUNTS = 4
    """Their first column by bin, as in `keelscope_probes.norms`."""


COLUMNS = {Routine.MOMENTS: slice(0, 6), Routine.SQUARES: slice(6, 8), Routine.LATE_TOKENS: slice(8, 11)}
"""Where a page keeps the terms of a routine; those of gradients come after those of outputs."""


def _load() -> Any:
    if os.environ.get(SWITCH, "") == "torch":
        return None
    try:
        native = importlib.import_module("keelscope._kernel")
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
        native.prepare(Tensor, torch.nn.Parameter, torch.strided, exchange, *dtypes)
        native.prepare_hooks(
            torch.is_grad_enabled,
            torch._C._current_graph_task_id,
            torch._C._functorch.peek_interpreter_stack,
            torch._C._get_tracing_state,
            OrderedDict,
        )
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


def norm_gains(x: Tensor, gamma: Tensor | float, width: int, *form: float) -> bytearray | None:
    """Gains of a norm over rows of `width` entries.

    Args:
        x: its input.
        gamma: ``[width]`` or one number.
        width: entries in a row.
        form: epsilon; whether rows are centred; 0, 1 or 2 for a divisor ``sqrt(m + eps)``, ``sqrt(m) + eps`` or
            ``max(sqrt(m), eps)``; whether m is the sum of squares and not their mean.

    Returns:
        Packed ``[row, 6]``, see `keelscope.jacobian.closed_forms.RowGains`; None where only torch can read them.
    """
    return None if _native is None else _native.norm_gains(x, None, gamma, width, *form)


def norm_transport(x: Tensor, gradient: Tensor, gamma: Tensor | float, width: int, *form: float) -> bytearray | None:
    """What a norm makes of a gradient, see `keelscope.jacobian.closed_forms.transported_squares`.

    Args:
        x: the input of the norm.
        gradient: with respect to its output.
        gamma: see `norm_gains`.
        width: see `norm_gains`.
        form: see `norm_gains`.

    Returns:
        Packed ``[2, row]``; None where only torch can read them.
    """
    return None if _native is None else _native.norm_transport(x, gradient, gamma, width, *form)


def pack_all(routine: Routine, tensors: list[Tensor]) -> tuple[NDArray[np.float64], list[int]] | None:
    """Run one routine over many tensors, in one call and into one array.

    Args:
        routine: `Routine.MOMENTS` or `Routine.SQUARES`.
        tensors: any tensors.

    Returns:
        ``[tensor, column]``, and the places of those that only torch can read; None without the compiled kernel.
    """
    if _native is None:
        return None
    packed, left = _native.pack_all(routine, tensors)
    return np.frombuffer(packed).reshape(len(tensors), COLUMNS[routine].stop - COLUMNS[routine].start), left


def page(modules: list[weakref.ref[nn.Module]], owner: weakref.ref[Any], breaks: Breaks, duties: bytes) -> Page | None:
    """What takes the ordinary calls of one recorded step.

    Args:
        modules: by site.
        owner: told of gradients: the first one, and those that the page does not take.
        breaks: told of every node of the graph that a hook is put on.
        duties: of each site, what is taken from its output and from the gradient of that.

    Returns:
        The page; None without the compiled kernel.
    """
    return None if _native is None else _native.Page(modules, owner, breaks, duties)


def passes(owner: weakref.ref[Any], parameters: list[weakref.ref[nn.Parameter]]) -> Passes | None:
    """What notes which parameters a backward pass reaches.

    Args:
        owner: told when one begins.
        parameters: by index.

    Returns:
        The note; None without the compiled kernel.
    """
    return None if _native is None else _native.Passes(owner, parameters)


def tree_of(modules: list[nn.Module]) -> bytes | None:
    """What modules consist of.

    Args:
        modules: the modules.

    Returns:
        Identities of the children and parameters of each, packed; None where only Python can tell.
    """
    return None if _native is None else _native.tree_of(modules)


def identities(objects: list[Any]) -> bytes:
    """Identities of the entries of a list.

    Args:
        objects: the list.

    Returns:
        They, packed: equal to what another list gives if that holds the same objects.
    """
    packed = None if _native is None else _native.identities(objects)
    return array("Q", map(id, objects)).tobytes() if packed is None else packed


def is_tree(modules: list[nn.Module], packed: object) -> bool | None:
    """Whether modules consist of what they consisted of.

    Args:
        modules: the modules.
        packed: what `tree_of` gave.

    Returns:
        The answer; None where only Python can tell.
    """
    return _native.is_tree(modules, packed) if _native is not None and isinstance(packed, bytes) else None


def are_identities(objects: list[Any], packed: bytes) -> bool:
    """Whether a list holds the same objects as another one.

    Args:
        objects: the list.
        packed: what `identities` gave of the other.

    Returns:
        The answer.
    """
    same = None if _native is None else _native.are_identities(objects, packed)
    return identities(objects) == packed if same is None else bool(same)
