"""What lies on the way from one tensor of a graph to another: weights, norms and activations.

Given the residual additions that `keelscope.topology.additions` found, this module answers where a branch enters and
leaves, and what happens to a sum before it is the stream of the next sub-layer. `keelscope.topology` makes records of
the answers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from keelscope.topology.additions import Addition
from keelscope.topology.coefficients import Coefficient, Coefficients
from keelscope.topology.graph import ADDITIONS, Key
from keelscope.topology.terms import Factor, Norm, Term, Terms, sources

__all__ = ["ACTIVATIONS", "Entry", "Trail", "Trails"]

ACTIVATIONS = frozenset(
    {
        "Relu",
        "Gelu",
        "Silu",
        "Elu",
        "LeakyRelu",
        "Hardtanh",
        "Hardswish",
        "Tanh",
        "Sigmoid",
        "Softplus",
        "Mish",
        "Prelu",
    }
)
_MOST_ENTRIES = 8


@dataclass(slots=True)
class Trail:
    """The way from one tensor back to an earlier one, latest step first."""

    keys: list[Key] = field(default_factory=list)
    events: list[Factor | Norm | str] = field(default_factory=list)
    """Weights, norms, and names of operations that are neither of these nor a change of shape."""

    @property
    def norms(self) -> list[Norm]:
        """The norms on the way."""
        return [event for event in self.events if isinstance(event, Norm)]

    @property
    def others(self) -> list[str]:
        """The operations on the way that are neither weight nor norm."""
        return [event for event in self.events if isinstance(event, str)]

    def factors(self) -> list[Factor]:
        """The weights between the later tensor and the first norm."""
        before = itertools.takewhile(lambda event: not isinstance(event, Norm), self.events)
        return [event for event in before if isinstance(event, Factor)]

    def inner_factors(self) -> list[Factor]:
        """The weights between the last norm and the earlier tensor."""
        return Trail(events=self.events[::-1]).factors()


@dataclass(frozen=True, slots=True)
class Entry:
    """One way in which a branch reads the stream, from the stream to its first product of matrices."""

    norms: tuple[Norm, ...] = ()
    factors: tuple[Factor, ...] = ()
    shifted: bool = False
    """Whether a learned bias is added."""


class Trails:
    """Follows tensors through one graph.

    Args:
        terms: the graph and how to take it apart.
        streams: for each residual sum the stream tensor it continues.
    """

    def __init__(self, terms: Terms, streams: Mapping[Key, Key]) -> None:
        self._terms = terms
        self.streams = streams
        """For each residual sum the stream tensor it continues."""
        self._normed: dict[Key, list[Key]] = {}
        for key, norm in terms.norms.items():
            if norm.source is not None:
                self._normed.setdefault(norm.source, []).append(key)

    def back(self, starts: Iterable[Key], goal: Key | None = None) -> Trail | None:
        """The way from tensors back to a goal without products of matrices.

        Args:
            starts: where to start.
            goal: where to end; None is the nearest residual sum.

        Returns:
            The way with both ends, or None if there is none.
        """
        parents: dict[Key, Key | None] = dict.fromkeys(starts)
        queue = [(-key[0], -key[1]) for key in parents]
        heapq.heapify(queue)
        while queue:
            position, output = heapq.heappop(queue)
            key = (-position, -output)
            if key == goal or (goal is None and key in self.streams):
                return self._trail(key, parents)
            if self._terms.graph.is_heavy(key[0]) or (goal is not None and key < goal):
                continue
            for source in sources(self._terms, key, self.streams):
                if source not in parents:
                    parents[source] = key
                    heapq.heappush(queue, (-source[0], -source[1]))
        return None

    def _trail(self, end: Key, parents: Mapping[Key, Key | None]) -> Trail:
        keys: list[Key] = []
        key: Key | None = end
        while key is not None:
            keys.append(key)
            key = parents[key]
        keys.reverse()
        trail = Trail(keys)
        for key in keys[:-1]:
            self._note(trail, key)
        return trail

    def _note(self, trail: Trail, key: Key) -> None:
        norm = self._terms.norms.get(key)
        step = self._terms.scale(key[0])
        if key in self.streams:
            return
        if norm is not None:
            trail.events.append(norm)
        elif step is None:
            trail.events.append(self._terms.graph.names[key[0]])
        else:
            trail.events += step[1]

    def branch_end(self, term: Term) -> Trail:
        """The way from a sum back into a branch, to its norm or to the first operation that is no weight."""
        trail = Trail(list(term.keys[:1]))
        key = term.keys[0]
        while len(term.keys) == 1 and not term.is_product and key not in self.streams:
            norm = self._terms.norms.get(key)
            if norm is not None:
                trail.events.append(norm)
                break
            step = self._terms.scale(key[0])
            if step is None:
                break
            key = step[0]
            trail.keys.append(key)
            trail.events += step[1]
        return trail

    def weight(self, key: Key, weights: Coefficients) -> Coefficient:
        """The weight with which a tensor multiplies the one before it."""
        step = self._terms.scale(key[0])
        return weights.of(() if step is None else step[1])

    def inner_norm(self, key: Key) -> Norm | None:
        """The norm whose output goes straight into the product of matrices that made a tensor."""
        graph = self._terms.graph
        if not graph.is_heavy(key[0]):
            return None
        for source in graph.inputs[key[0]]:
            current = source
            while current is not None and not self._terms.is_parameter(current):
                norm = self._terms.norms.get(current)
                step = None if norm is not None else self._terms.scale(current[0])
                if norm is not None:
                    return norm
                current = None if step is None else step[0]
        return None

    def region(self, terms: Iterable[Term], stream: Key) -> list[Key]:
        """Tensors between a stream tensor and the branches that read it, in execution order, both ends included."""
        stack = [key for term in terms for key in term.keys]
        found = set(stack)
        while stack:
            key = stack.pop()
            if key == stream:
                continue
            for source in sources(self._terms, key, self.streams):
                if source >= stream and source not in found:
                    found.add(source)
                    stack.append(source)
        between = {stream}
        for key in sorted(found):
            if not between.isdisjoint(sources(self._terms, key, self.streams)):
                between.add(key)
        return sorted(between)

    def entries(self, region: list[Key], stream: Key) -> set[Entry]:
        """The ways in which a branch reads the stream."""
        at: dict[Key, set[Entry]] = {stream: {Entry()}}
        entering: set[Entry] = set()
        for key in region:
            came = {entry for source in sources(self._terms, key, self.streams) for entry in at.get(source, ())}
            if key == stream or not came:
                continue
            if self._terms.graph.is_heavy(key[0]):
                entering |= came
            elif len(came) <= _MOST_ENTRIES:
                at[key] = {self._passed(entry, key) for entry in came}
        return entering

    def _passed(self, entry: Entry, key: Key) -> Entry:
        norm = self._terms.norms.get(key)
        if norm is not None:
            return Entry((*entry.norms, norm))
        graph, name = self._terms.graph, self._terms.graph.names[key[0]]
        if name == "Tanh" and not entry.norms:
            return Entry((Norm(":tanh", None, "d"),))
        if name in ADDITIONS:
            shifted = any(source is not None and self._terms.is_parameter(source) for source in graph.inputs[key[0]])
            return Entry(entry.norms, entry.factors, entry.shifted or shifted)
        step = self._terms.scale(key[0])
        return entry if step is None else Entry(entry.norms, entry.factors + step[1], entry.shifted)

    def ahead(self, addition: Addition) -> list[Key]:
        """What becomes of a sum that no later sub-layer continues: itself, then weights, biases, activations, norms."""
        keys = [addition.key]
        while True:
            following = self._next(keys[-1])
            if following is None:
                return keys
            keys.append(following)

    def _next(self, key: Key) -> Key | None:
        graph = self._terms.graph
        normed = self._normed.get(key, [])
        if normed:
            return max(normed) if len({self._terms.norms[key].path for key in normed}) == 1 else None
        readers = graph.readers[key]
        if len(readers) != 1:
            return None
        step = self._terms.scale(readers[0])
        passes = graph.names[readers[0]] in ACTIVATIONS or (step is not None and step[0] == key)
        return (readers[0], 0) if passes else None
