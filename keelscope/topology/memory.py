"""Readings of earlier forwards, for those that follow with a graph of the same shape: they need not be read again.

What a reading says of names, forms and places depends on nothing but the shape of the graph (`Imprint`); what is read
anew each time are tensors and weights. Where something depends on more, nothing is remembered.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch.autograd.graph import Node

from keelscope.topology.graph import Graph, Key
from keelscope.topology.hearing import Hearing, Shown, enough
from keelscope.topology.imprint import Imprint
from keelscope.topology.listener import Listener
from keelscope.topology.live import LiveGraph, Places
from keelscope.topology.recipes import Kept, Order, kept
from keelscope.topology.records import Topology
from keelscope.topology.terms import Factor

__all__ = ["Memory"]

_MOST = 2
_FIRST_PATIENCE, _GROWTH = 2, 4
"""Graphs of a known shape until fewer modules are listened to; how many times more once another was missed."""


@dataclass(slots=True, eq=False)
class _Reading:
    """One reading."""

    topology: Topology
    places: Places
    imprint: Imprint
    positions: dict[Key, int]
    """Of the tensors that recipes take, among those that the listener has."""
    factors: tuple[Factor, ...]
    """The weights that recipes take."""

    loss: int | None
    """How many operations followed the last call; modules that are not listened to may be among others."""
    begun: frozenset[str] = frozenset()
    """Modules that ran inside no other, when a graph had this shape again; none before."""
    excerpt: tuple[Hearing, Imprint, dict[Key, int]] | None = None
    """Imprint and positions where not all modules are listened to."""
    packed: tuple[dict[Key, int], tuple[bytes, Order]] | None = None
    """Positions as the compiled kernel takes them, and their order."""

    def again(self, listener: Listener) -> LiveGraph | None:
        """The same places in another graph; None if it has another shape, or something is not there this time."""
        if not self._is_covered(listener):
            return None
        imprint, positions = self._as_heard(listener.hearing)
        nodes = imprint.nodes_of(listener)
        if nodes is None or not _are_kept(nodes, self.factors):
            return None
        packed, order = self._packed_of(positions)
        tensors = listener.kept(packed)
        if tensors is None:
            return None
        return LiveGraph(self.places, nodes, Kept(order, tensors), functools.partial(kept, nodes))

    def _as_heard(self, hearing: Hearing | None) -> tuple[Imprint, dict[Key, int]]:
        if hearing is None:
            return self.imprint, self.positions
        if self.excerpt is None or self.excerpt[0] is not hearing:
            imprint = self.imprint.excerpt(hearing)
            self.excerpt = hearing, imprint, _first_positions(imprint.keys, self.positions.keys())
        return self.excerpt[1:]

    def _packed_of(self, positions: dict[Key, int]) -> tuple[bytes, Order]:
        if self.packed is None or self.packed[0] is not positions:
            numbers = np.fromiter(positions.values(), np.int32, len(positions))
            self.packed = positions, (numbers.tobytes(), Order(positions))
        return self.packed[1]

    def tell(self, listener: Listener) -> bool:
        """Tell a listener of all calls, if its graph differs from this one in sizes, types and numbers alone."""
        return self._is_covered(listener) and self.imprint.tell(listener, self._as_heard(listener.hearing)[0])

    def _is_covered(self, listener: Listener) -> bool:
        """Whether a listener would have heard all that this reading is about, and all that ran."""
        if listener.hearing is None:
            return True
        positions = self._as_heard(listener.hearing)[1]
        return len(positions) == len(self.positions) and self.loss == listener.operations_since() is not None

    def ends(self, begun: Set[str]) -> frozenset[str] | None:
        """Modules that show what has to be known, beside those whose calls are heard from the beginning; or None."""
        wanted: set[Shown] = {*self.positions, *self.imprint.tops}
        return enough(self.imprint.shown(), wanted, begun)


class Memory:
    """The latest readings of one model."""

    def __init__(self) -> None:
        self.hearing: Hearing | None = None
        """Modules that it is enough to listen to; None while graphs do not repeat their shape."""
        self._known: list[_Reading] = []
        self._fringe: tuple[Hearing, list[_Reading], frozenset[str]] | None = None
        self._met, self._patience = 0, _FIRST_PATIENCE

    @property
    def fringe(self) -> frozenset[str] | None:
        """Paths of the modules in which forwards begin and end: those that run inside no other, and the first to end;
        None while all are listened to.
        """
        if self.hearing is None:
            return None
        if self._fringe is None or self._fringe[0] is not self.hearing or self._fringe[1] is not self._known:
            firsts = (path for known in self._known for path, _ in islice(known.imprint.shown(), 1))
            self._fringe = self.hearing, self._known, self.hearing.begun.union(firsts)
        return self._fringe[2]

    def hear_all(self) -> None:
        """Have all modules listened to for a while: what is known may fit no longer."""
        self.hearing, self._met = None, 0

    def doubt(self) -> None:
        """A step has ended without a graph to recall: `hear_all`, and for longer if few modules were listened to."""
        if self.hearing is not None:
            self._patience *= _GROWTH
        self.hear_all()

    def recall(self, listener: Listener) -> tuple[Topology, LiveGraph] | None:
        """What was read of an earlier forward, with the nodes and tensors of this one.

        Args:
            listener: the calls of the forward.

        Returns:
            Topology and live graph; None if no graph of this shape was read. The listener knows all calls then, unless
            it heard some modules of a graph of another structure.
        """
        for known in self._known:
            live = known.again(listener)
            if live is not None:
                self._meet(known, listener)
                return known.topology, live
        if listener.hearing is not None:
            if any(known.tell(listener) for known in self._known):
                return None
            self._patience *= _GROWTH
        self.hear_all()
        return None

    def _meet(self, known: _Reading, listener: Listener) -> None:
        """A graph had this shape again; after a few of them, fewer modules are listened to."""
        if listener.hearing is not None:
            return
        known.begun = frozenset({*listener.outermost, *listener.wrappers, ""})
        loss = listener.operations_since()
        if loss is None or loss != known.loss:
            known.loss, self._met = loss, 0
            return
        self._met += 1
        if self._met >= self._patience:
            self.hearing = _hearing_of([one for one in self._known if one.begun])

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
        wanted = {key for recipe in recipes for key in recipe.keys(live.tensors)}
        positions = _first_positions(listener.keys(graph), wanted & live.tensors.keys())
        loss = listener.operations_since()
        reading = _Reading(topology, live.places, Imprint(graph, listener), positions, factors, loss)
        if self.hearing is not None:
            reading.begun = self.hearing.begun
            ends = reading.ends(self.hearing.begun)
            is_heard = ends is not None and all(path in self.hearing for path in ends)
            if not is_heard or any(len(known.positions) > len(positions) for known in self._known):
                self.hear_all()
        self._known = [reading, *self._known][:_MOST]


def _hearing_of(known: Sequence[_Reading]) -> Hearing | None:
    """What shows all that these readings are about; None where nothing does."""
    begun = frozenset[str]().union(*(one.begun for one in known))
    ends = [one.ends(begun) for one in known]
    found = frozenset[str]().union(*(some for some in ends if some is not None))
    return None if None in ends else Hearing(begun, found - begun)


def _first_positions(keys: Sequence[Key | None], wanted: Set[Key]) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for position, key in enumerate(keys):
        if key is not None and key in wanted:
            found.setdefault(key, position)
    return found


def _are_kept(nodes: Sequence[Node], factors: Iterable[Factor]) -> bool:
    """Whether all weights are plain numbers, or kept by their nodes."""
    return all(kept(nodes, factor) is not None for factor in factors)
