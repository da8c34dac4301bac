r"""A gradient carried along shortcuts alone: ``c <- a J_n^T c`` from one stream tensor to the ones before.

Autograd's own nodes are called one by one, before the engine gets to them, so that every norm, weight, cast and dropout
mask is passed exactly as the model has it, and what they saved is neither copied nor freed. Branch outputs are not
passed: the result is the gradient of the same model with its branches detached.

Nodes that would run code of the user or of a wrapper are left alone: user-written functions, and tensors that saving
hooks hold back (activation checkpoints, which would run their region again).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from keelscope.paths.regions import Hop
from keelscope.topology.graph import Key, operation
from keelscope.topology.readable import is_readable

__all__ = ["carry", "obstacle"]


def carry(nodes: Sequence[Node], hop: Hop, gradient: Tensor) -> dict[Key, Tensor]:
    """Carry a gradient along one hop.

    Args:
        nodes: of the graph; those of the hop have not been run by a backward pass yet.
        hop: the way, without `obstacle`.
        gradient: with respect to the hop's start.

    Returns:
        What arrives at each target; targets that nothing reaches are absent.
    """
    if hop.is_plain:
        return dict.fromkeys(hop.targets, gradient)
    waiting: dict[Key, Tensor] = {hop.start: gradient.detach()}
    arrived: dict[Key, Tensor] = {}
    with torch.no_grad():
        for move in hop.moves:
            node = nodes[move.node]
            arriving = [waiting.pop((move.node, output), None) for output in range(_outputs(node))]
            if all(part is None for part in arriving):
                continue
            given = arriving if move.is_wrapper else _through(node, arriving)
            for slot, key, is_target in move.passes:
                part = given[slot] if slot < len(given) else None
                if isinstance(part, Tensor):
                    _add(arrived if is_target else waiting, key, _as_engine_does(nodes, key, part))
    return arrived


def obstacle(nodes: Sequence[Node], hop: Hop) -> str:
    """Why a hop cannot be followed.

    Args:
        nodes: of the graph.
        hop: the way.

    Returns:
        One clause, or an empty string.
    """
    for move in () if hop.is_plain else hop.moves:
        node = nodes[move.node]
        if move.is_wrapper:
            continue
        if isinstance(node, BackwardCFunction):
            return f"the shortcut passes {operation(node)}, a function whose backward is not torch's own"
        if any(getattr(saved, "unpack_hook", None) is not None for saved in _raw(node)):
            name = operation(node)
            return f"what {name} on the shortcut needs is kept by an activation checkpoint or another saving hook"
        if not all(is_readable(saved) for saved in _saved(node)):
            name = operation(node)
            return f"what {name} on the shortcut needs is not in memory, as of a sharded weight that is not gathered"
    return ""


def _through(node: Node, arriving: Sequence[Tensor | None]) -> Sequence[object]:
    passed: object = node(*arriving)  # type: ignore[operator]
    return passed if isinstance(passed, tuple) else (passed,)


def _as_engine_does(nodes: Sequence[Node], key: Key, part: Tensor) -> Tensor:
    """A gradient in the shape and type of its tensor: the engine sums over broadcast dimensions, nodes do not."""
    expected = nodes[key[0]]._input_metadata[key[1]]
    if part.shape != tuple(expected.shape):
        part = part.sum_to_size(expected.shape)
    return part.detach().to(expected.dtype)


def _add(sums: dict[Key, Tensor], key: Key, part: Tensor) -> None:
    sums[key] = sums[key] + part if key in sums else part


def _outputs(node: Node) -> int:
    return len(getattr(node, "_input_metadata", (None,)))


def _raw(node: Node) -> Iterator[object]:
    """What a node saved, still packed."""
    for attribute in _attributes(type(node), "_raw_saved_"):
        yield from _listed(node, attribute)


def _saved(node: Node) -> Iterator[Tensor]:
    """The tensors that a node saved; asked only where no hook would run."""
    for attribute in _attributes(type(node), "_saved_"):
        yield from (value for value in _listed(node, attribute) if isinstance(value, Tensor))


def _listed(node: Node, attribute: str) -> Sequence[object]:
    try:
        value: object = getattr(node, attribute)
    except RuntimeError:  # freed, or written into since: the real backward pass would fail here too
        return ()
    return value if isinstance(value, tuple | list) else (value,)


@functools.cache
def _attributes(kind: type[Node], prefix: str) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(prefix))
