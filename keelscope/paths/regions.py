"""Which nodes of a graph are branch and which are shortcut, between neighbouring stream tensors.

A node is branch if it leads to a branch's output without passing a stream tensor. What leads from one stream tensor to
others before it, not through a branch's output, is a hop: norms on the sum, the sum itself, weights on the shortcut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keelscope.topology.graph import Key
from keelscope.topology.live import LiveGraph

__all__ = ["Hop", "Regions"]


@dataclass(frozen=True, slots=True)
class Hop:
    """The way from one stream tensor back to earlier ones along shortcuts."""

    start: Key
    nodes: tuple[int, ...]
    """Latest first; the first one made the start."""
    targets: frozenset[Key]
    """Stream tensors that it leads to."""


class Regions:
    """Branches and hops of one live graph.

    Args:
        live: the graph with its sub-layers.
    """

    def __init__(self, live: LiveGraph) -> None:
        self._graph = live.graph
        places = (*live.sublayers, *live.further)
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
        self._on_hops = frozenset(node for hop in self.hops.values() for node in hop.nodes)

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
            return Hop(start, (), frozenset())
        stack, found = [start[0]], {start[0]}
        while stack:
            for key in self._graph.inputs[stack.pop()]:
                if key is None or key in self.streams or key in self.cuts or key[0] in found:
                    continue
                found.add(key[0])
                stack.append(key[0])
        return self._leading(start, found)

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
        return Hop(start, tuple(sorted(leading, reverse=True)), frozenset(targets))
