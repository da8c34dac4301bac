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

from keelscope.paths.regions import WRAPPERS, Hop
from keelscope.topology.graph import Graph, Key, operation
from keelscope.topology.readable import is_readable

__all__ = ["carry", "obstacle"]


def carry(graph: Graph, hop: Hop, gradient: Tensor, cuts: frozenset[Key]) -> dict[Key, Tensor]:
    """Carry a gradient along one hop.

    Args:
        graph: the graph; nodes of the hop have not been run by a backward pass yet.
        hop: the way, without `obstacle`.
        gradient: with respect to the hop's start.
        cuts: tensors that are not passed.

    Returns:
        What arrives at each target; targets that nothing reaches are absent.
    """
    waiting: dict[Key, Tensor] = {hop.start: gradient.detach()}
    members = frozenset(hop.nodes)
    arrived: dict[Key, Tensor] = {}
    with torch.no_grad():
        for index in hop.nodes:
            node = graph.nodes[index]
            arriving = [waiting.pop((index, output), None) for output in range(_outputs(node))]
            if all(part is None for part in arriving):
                continue
            for key, part in zip(graph.inputs[index], _through(node, arriving), strict=False):
                if key is None or key in cuts or not isinstance(part, Tensor):
                    continue
                if key in hop.targets or key[0] in members:
                    _add(arrived if key in hop.targets else waiting, key, _as_engine_does(graph, key, part))
    return arrived


def obstacle(graph: Graph, hop: Hop) -> str:
    """Why a hop cannot be followed.

    Args:
        graph: the graph.
        hop: the way.

    Returns:
        One clause, or an empty string.
    """
    for index in hop.nodes:
        node = graph.nodes[index]
        name = operation(node)
        if name in WRAPPERS:
            continue
        if isinstance(node, BackwardCFunction):
            return f"the shortcut passes {name}, a function whose backward is not torch's own"
        if any(getattr(saved, "unpack_hook", None) is not None for saved in _raw(node)):
            return f"what {name} on the shortcut needs is kept by an activation checkpoint or another saving hook"
        if not all(is_readable(saved) for saved in _saved(node)):
            return f"what {name} on the shortcut needs is not in memory, as of a sharded weight that is not gathered"
    return ""


def _through(node: Node, arriving: Sequence[Tensor | None]) -> Sequence[object]:
    if operation(node) in WRAPPERS:
        return arriving
    passed: object = node(*arriving)  # type: ignore[operator]
    return passed if isinstance(passed, tuple) else (passed,)


def _as_engine_does(graph: Graph, key: Key, part: Tensor) -> Tensor:
    """A gradient in the shape and type of its tensor: the engine sums over broadcast dimensions, nodes do not."""
    expected = graph.nodes[key[0]]._input_metadata[key[1]]
    if part.shape != expected.shape:
        part = part.sum_to_size(expected.shape)
    return part.to(expected.dtype)


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
