"""What happens at which node of graphs of one shape while gradients pass: the plan that `PathFlow` carries out.

Made once from a graph, it names places only and serves for every later graph of the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keelscope.paths.regions import Hop, Regions, hands_on
from keelscope.topology.graph import Graph, Key
from keelscope.topology.live import LiveSublayer, Places

__all__ = ["Before", "Plan", "Reader", "Routes", "StreamPlace"]


@dataclass(frozen=True, slots=True)
class Reader:
    """A node that takes a stream tensor."""

    stream: Key
    slots: tuple[int, ...]
    """Which of its inputs the stream tensor is."""
    is_branch: bool
    """Whether it leads into a branch."""
    is_carried: bool
    """Whether what it hands over is known from following the shortcut."""


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """One stream tensor."""

    enters: tuple[int, ...]
    """Positions of the sub-layers that read it as their stream."""
    leaves: tuple[int, ...]
    """Positions of the sub-layers that put it out."""
    hop: Hop | None
    """The way on along shortcuts."""
    starts_here: bool
    """Whether the way begins at the stream tensor itself."""
    is_end: bool
    """Whether it is no sub-layer's stream: all that arrives comes from outside."""


@dataclass(slots=True)
class Before:
    """What to do with the gradients of a node's outputs, before the node runs; in this order."""

    arrivals: list[Key]
    """Stream tensors that the node puts out."""
    starts: list[Key]
    """Stream tensors whose way along shortcuts begins here."""
    totals: list[int]
    """Positions of the sub-layers whose sum it is."""
    passes: list[Reader]
    """Stream tensors that are handed the same gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Routes as numbers, as ``native/ways.c`` describes them."""

    keys: tuple[Key, ...]
    """The stream tensors in the order in which they are numbered."""
    numbers: bytes
    hooks: bytes
    """Of each hook its node, the place of its record, and whether it comes after the node."""


class Routes:
    """The plan for one shape of graphs.

    Args:
        graph: one of them.
        places: where its sub-layers lie.
    """

    def __init__(self, graph: Graph, places: Places) -> None:
        regions = Regions(graph, places)
        self.places = places
        self.plan: Plan | None = None
        """The same as numbers, made by `keelscope.paths.plan` once the compiled kernel needs them."""
        self.streams = _streams(places.sublayers, regions)
        """Every stream tensor before or after a sub-layer."""
        self.before: dict[int, Before] = {}
        """What happens before a node runs."""
        self.after: dict[int, list[Reader]] = {}
        """What is taken from what a node hands over."""
        self._around_streams(graph, regions)
        for key, place in self.streams.items():
            if place.hop is not None and not place.starts_here:
                self._at(place.hop.start[0]).starts.append(key)
        for position, sublayer in enumerate(places.sublayers):
            if sublayer.addition is not None:
                self._at(sublayer.addition.root).totals.append(position)

    def _around_streams(self, graph: Graph, regions: Regions) -> None:
        for key in self.streams:
            self._at(key[0]).arrivals.append(key)
            for node in dict.fromkeys(graph.readers[key]):
                slots = tuple(slot for slot, source in enumerate(graph.inputs[node]) if source == key)
                reader = Reader(key, slots, regions.is_branch(node), regions.is_carried(node))
                if len(slots) == 1 and hands_on(graph, node, key):
                    self._at(node).passes.append(reader)
                else:
                    self.after.setdefault(node, []).append(reader)

    def _at(self, node: int) -> Before:
        return self.before.setdefault(node, Before([], [], [], []))


def _streams(sublayers: Iterable[LiveSublayer], regions: Regions) -> dict[Key, StreamPlace]:
    enters: dict[Key, list[int]] = {}
    leaves: dict[Key, list[int]] = {}
    for position, sublayer in enumerate(sublayers):
        enters.setdefault(sublayer.entering, []).append(position)
        leaves.setdefault(sublayer.leaving, []).append(position)
    found = {}
    for key in sorted(regions.streams):
        hop = regions.hops.get(key)
        around = tuple(enters.get(key, ())), tuple(leaves.get(key, ()))
        found[key] = StreamPlace(*around, hop, hop is not None and hop.start == key, key not in regions.entered)
    return found
