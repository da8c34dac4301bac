"""Which nodes of a graph are branch and which are shortcut, between neighbouring stream tensors.

A node is branch if it leads to a branch's output without passing a stream tensor. What leads from one stream tensor to
others before it, not through a branch's output, is a hop: norms on the sum, the sum itself, weights on the shortcut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from keelscope.topology.graph import Graph, Key
from keelscope.topology.live import Places

__all__ = ["WRAPPERS", "Hop", "Move", "Regions", "hands_on"]

WRAPPERS = frozenset({"RegisterPostBackwardFunction"})
"""What FSDP puts around the inputs of a wrapped module: the identity, but for what it sets off in a backward pass."""


_REAL = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class Move:
    """One node of a hop."""

    node: int
    is_wrapper: bool
    passes: tuple[tuple[int, Key, bool], ...]
    """Which of what it gives is passed on: its input, the tensor, and whether that is a stream tensor."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The way from one stream tensor back to earlier ones along shortcuts."""

    start: Key
    """The stream tensor, before what a wrapper makes of it: a sharded block's weights are there from here on."""
    moves: tuple[Move, ...]
    """Latest first; the first one made the start."""
    targets: frozenset[Key]
    """Stream tensors that it leads to."""
    is_plain: bool
    """Whether the only target is handed the gradient as it is: a sum without weights."""


class Regions:
    """Branches and hops of one graph.

    Args:
        graph: the graph.
        found: where its sub-layers lie.
    """

    def __init__(self, graph: Graph, found: Places) -> None:
        self._graph = graph
        places = (*found.sublayers, *found.further)
        self.entered = frozenset(place.entering for place in places)
        """Every stream tensor before a sub-layer."""
        self.streams = self.entered | {place.leaving for place in places}
        """Every stream tensor before or after a sub-layer."""
        self.cuts = frozenset(key for place in places for key in place.branches)
        """Outputs of branches."""
        self.branches = self._behind(key[0] for key in self.cuts)
        """Nodes of branches."""
        self.hops = {place.leaving: self._hop(place.leaving) for place in places}
        """Per stream tensor after a sub-layer the way on along shortcuts; where a stream begins, it ends."""
        self._on_hops = frozenset(move.node for hop in self.hops.values() for move in hop.moves)

    def is_branch(self, node: int) -> bool:
        """Whether what a node reads of the stream goes into a branch."""
        return node in self.branches

    def is_carried(self, node: int) -> bool:
        """Whether a node lies on a hop, so that `keelscope.paths.chain` knows what it passes on."""
        return node in self._on_hops and node not in self.branches

    def _behind(self, nodes: Iterable[int]) -> frozenset[int]:
        """Nodes that lead to some nodes without passing a stream tensor."""
        stack = list(nodes)
        found = set(stack)
        while stack:
            for key in self._graph.inputs[stack.pop()]:
                if key is not None and key not in self.streams and key[0] not in found:
                    found.add(key[0])
                    stack.append(key[0])
        return frozenset(found)

    def _hop(self, start: Key) -> Hop:
        if start in self.cuts:
            return Hop(start, (), frozenset(), is_plain=False)
        start = self._unwrapped(start)
        stack, found = [start[0]], {start[0]}
        while stack:
            for key in self._graph.inputs[stack.pop()]:
                if key is None or key in self.streams or key in self.cuts or key[0] in found:
                    continue
                found.add(key[0])
                stack.append(key[0])
        return self._leading(start, found)

    def _unwrapped(self, key: Key) -> Key:
        while self._graph.names[key[0]] in WRAPPERS:
            source = self._graph.inputs[key[0]][key[1]]
            if source is None or source in self.streams:
                break
            key = source
        return key

    def _leading(self, start: Key, found: set[int]) -> Hop:
        """The nodes of a hop that lead to a stream tensor; a parameter's side does not."""
        leading: set[int] = set()
        targets: set[Key] = set()
        for node in sorted(found):
            for key in self._graph.inputs[node]:
                if key is None or key in self.cuts:
                    continue
                if key in self.streams:
                    targets.add(key)
                if key in self.streams or key[0] in leading:
                    leading.add(node)
        moves = tuple(self._move(node, leading, targets) for node in sorted(leading, reverse=True))
        return Hop(start, moves, frozenset(targets), is_plain=self._is_plain(moves, targets))

    def _move(self, node: int, leading: set[int], targets: set[Key]) -> Move:
        passes = tuple(
            (slot, key, key in targets)
            for slot, key in enumerate(self._graph.inputs[node])
            if key is not None and key not in self.cuts and (key in targets or key[0] in leading)
        )
        return Move(node, self._graph.names[node] in WRAPPERS, passes)

    def _is_plain(self, moves: tuple[Move, ...], targets: set[Key]) -> bool:
        if len(moves) != 1 or len(moves[0].passes) != 1:
            return False
        return all(hands_on(self._graph, moves[0].node, key) for key in targets)


def hands_on(graph: Graph, node: int, key: Key) -> bool:
    """Whether a node hands the gradient that it gets on to one of its inputs as it is.

    Args:
        graph: the graph.
        node: the node.
        key: the input.

    Returns:
        True for a sum without weights and broadcasting.
    """
    if graph.names[node] != "Add" or graph.plain(node, "_saved_alpha", 1.0) != 1:
        return False
    whole = node, 0
    is_same = graph.dtype(whole) == graph.dtype(key) and graph.dtype(key) in _REAL
    return is_same and graph.shape(whole) is not None and graph.shape(whole) == graph.shape(key)
