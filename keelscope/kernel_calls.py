"""What the compiled kernel does where modules are called, and for graphs of a known shape; see `keelscope.kernel`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from keelscope import kernel

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = [
    "hang_hooks",
    "hearing",
    "kept_tensors",
    "other_tensors",
    "place_hooks",
    "same_calls",
    "same_nodes",
    "same_numbers",
]


def same_nodes(starts: list[Node], known: tuple[object, ...], origin: int) -> list[Node] | None:
    """Walk a graph beside one of a known shape, see `keelscope.topology.imprint`.

    Args:
        starts: nodes to start from.
        known: places of the starts, edges, numbers, kinds and marks of the nodes.
        origin: what numbers are counted from.

    Returns:
        The nodes in the known order; None if the graph has another shape.

    Raises:
        NotImplementedError: without the compiled kernel.
    """
    if kernel._native is None:
        raise NotImplementedError
    found: list[Node] | None = kernel._native.same_nodes(starts, *known, origin)
    return found


def same_calls(rows: list[Any], expected: list[Any], modules: list[Any], origin: int) -> bool | None:
    """Whether the same modules were called in the same way, see `keelscope.topology.imprint`.

    Args:
        rows: the calls.
        expected: the same without modules, counted from 0.
        modules: weak references.
        origin: what numbers are counted from.

    Returns:
        The answer; None without the compiled kernel.
    """
    return None if kernel._native is None else kernel._native.same_calls(rows, expected, modules, origin)


def other_tensors(
    nodes: list[Node], wanted: list[Any], kept: tuple[list[Tensor | None], list[int]], positions: bytes
) -> Iterable[int]:
    """What nodes put out that has another shape or type than wanted.

    Args:
        nodes: the nodes.
        wanted: place of a node, which output, shape and type; None for what does not matter.
        kept: tensors, and the version of each when it was kept.
        positions: of the wanted among the kept, as 32-bit numbers; -1 of those that were not kept.

    Returns:
        Places among the wanted, also those where only Python can tell; all of them without the compiled kernel.
    """
    if kernel._native is None:
        return range(len(wanted))
    found: Iterable[int] = kernel._native.other_tensors(nodes, wanted, *kept, positions)
    return found


def same_numbers(nodes: list[Node], wanted: list[tuple[int, str, object]]) -> bool:
    """Whether nodes keep numbers.

    Args:
        nodes: the nodes.
        wanted: place of a node, name of an attribute and the number.

    Returns:
        The answer.
    """
    if kernel._native is None:
        return all(getattr(nodes[i], attribute, None) == number for i, attribute, number in wanted)
    is_same: bool = kernel._native.same_numbers(nodes, wanted)
    return is_same


def kept_tensors(tensors: list[Tensor | None], versions: list[int], positions: bytes) -> list[Tensor] | None:
    """Tensors that were kept.

    Args:
        tensors: all of them.
        versions: of each, when it was kept.
        positions: of those that are wanted, as 32-bit numbers.

    Returns:
        These; None where something was written into one since, or it was not kept.
    """
    if kernel._native is not None:
        kept: list[Tensor] | None = kernel._native.kept_tensors(tensors, versions, positions)
        return kept
    chosen = [(tensors[i], versions[i]) for i in np.frombuffer(positions, np.int32)]
    found = [tensor for tensor, version in chosen if tensor is not None and tensor._version == version]
    return found if len(found) == len(chosen) else None


def hearing(*listener: object) -> Callable[..., int] | None:
    """What hears module calls, see `keelscope.topology.listener`.

    Args:
        listener: what it consists of, as ``native/calls.c`` has it.

    Returns:
        A function of what hooks get; None without the compiled kernel.
    """
    return None if kernel._native is None else partial(kernel._native.hear_call, listener)


def hang_hooks(ears: list[Any], number: int, *, on: bool) -> bool:
    """Put hooks on modules, or take them off.

    Args:
        ears: each an `keelscope.ears.Ear`.
        number: what they go under on their modules.
        on: whether to put them on.

    Returns:
        Whether it was done; False without the compiled kernel.
    """
    if kernel._native is None:
        return False
    kernel._native.hang_hooks(ears, number, on)
    return True


def place_hooks(placements: list[Any], *, on: bool) -> list[Any]:
    """Put hooks back after modules that have no others, or take them off.

    Args:
        placements: each a `keelscope.placements.Placement`; those whose module is gone are left out.
        on: whether to put them back.

    Returns:
        Those whose module has other hooks too: nothing was done, since their order matters. All of them without the
        compiled kernel.
    """
    left: list[Any] = placements if kernel._native is None else kernel._native.place_hooks(placements, on)
    return left
