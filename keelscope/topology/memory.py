"""Readings of earlier forwards, for those that follow with a graph of the same shape: they need not be read again.

What a reading says of names, forms and places depends on nothing but the shape of the graph (`Imprint`); what is read
anew each time are tensors and weights. Where something depends on more, nothing is remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from keelscope.topology.graph import Graph, Key
from keelscope.topology.imprint import Imprint
from keelscope.topology.listener import Listener
from keelscope.topology.live import LiveGraph, Places
from keelscope.topology.recipes import kept
from keelscope.topology.records import Topology
from keelscope.topology.terms import Factor

__all__ = ["Memory"]

_MOST = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """One reading."""

    topology: Topology
    places: Places
    imprint: Imprint
    positions: dict[Key, int]
    """Of the tensors that recipes take, among those that the listener has."""
    factors: tuple[Factor, ...]
    """The weights that recipes take."""

    def again(self, listener: Listener) -> LiveGraph | None:
        """The same places in another graph; None if it has another shape, or something is not there this time."""
        nodes = self.imprint.nodes_of(listener)
        if nodes is None or not _are_kept(nodes, self.factors):
            return None
        tensors: dict[Key, Tensor] = {}
        for key, position in self.positions.items():
            tensor = listener.tensor(position)
            if tensor is None:
                return None
            tensors[key] = tensor
        return LiveGraph(self.places, nodes, tensors, functools.partial(kept, nodes))


class Memory:
    """The latest readings of one model."""

    def __init__(self) -> None:
        self._known: list[_Reading] = []

    def recall(self, listener: Listener) -> tuple[Topology, LiveGraph] | None:
        """What was read of an earlier forward, with the nodes and tensors of this one.

        Args:
            listener: the calls of the forward.

        Returns:
            Topology and live graph; None if no graph of this shape was read.
        """
        for known in self._known:
            live = known.again(listener)
            if live is not None:
                return known.topology, live
        return None

    def learn(self, listener: Listener, graph: Graph, topology: Topology, live: LiveGraph) -> None:
        """Remember a reading, if the next one of the same shape would be the same.

        Args:
            listener: the calls of its forward.
            graph: its graph.
            topology: what was read.
            live: the same as places.
        """
        recipes = [recipe for recipe in live.places.recipes if recipe is not None]
        factors = tuple(factor for recipe in recipes for factor in recipe.factors())
        if any(start < 0 for _, _, (start, _), *_ in listener.rows) or not _are_kept(live.nodes, factors):
            return
        wanted = {key for recipe in recipes for key in recipe.keys}
        positions: dict[Key, int] = {}
        for position, key in enumerate(listener.keys(graph)):
            if key is not None and key in wanted & live.tensors.keys():
                positions.setdefault(key, position)
        reading = _Reading(topology, live.places, Imprint(graph, listener), positions, factors)
        self._known = [reading, *self._known][:_MOST]


def _are_kept(nodes: Sequence[Node], factors: Iterable[Factor]) -> bool:
    """Whether all weights are plain numbers, or kept by their nodes."""
    return all(kept(nodes, factor) is not None for factor in factors)
