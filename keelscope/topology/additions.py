"""Residual additions of a graph: which sums join a shortcut and a branch, and at which stream tensor the two part.

A sum is residual if, back to one common tensor, one operand passes no product of matrices, convolution, embedding or
attention and another passes at least one. That leaves out rotary positions, epsilons, activations, masks, biases and
position embeddings. Found additions are crossed along their shortcut afterwards, so that what lies inside an earlier
branch (a position bias that all layers share, say) is not taken for a stream.
"""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass, replace

from keelscope.topology.graph import ADDITIONS, FUSED_ADDITIONS, Key
from keelscope.topology.terms import Term, Terms, sources

__all__ = ["Addition", "residual_additions"]


@dataclass(frozen=True, slots=True)
class Addition:
    """A residual addition: ``sum of factors * shortcuts + sum of factors * branches``."""

    root: int
    """Index of the node that adds."""
    stream: Key
    """The common tensor."""
    shortcuts: tuple[Term, ...]
    branches: tuple[Term, ...]

    @property
    def key(self) -> Key:
        """The sum."""
        return self.root, 0


def residual_additions(terms: Terms, inside: Container[int]) -> tuple[list[Addition], dict[Key, Key]]:
    """Every residual addition of a graph, in execution order.

    Args:
        terms: the graph and how to take it apart.
        inside: nodes to leave out (inside norms and recurrent modules).

    Returns:
        The additions, and for each sum the stream tensor it continues.
    """
    search = _Search(terms)
    candidates = ADDITIONS | FUSED_ADDITIONS
    found: dict[int, Addition] = {}
    for index, name in enumerate(terms.graph.names):
        if name not in candidates or index in inside:
            continue
        addition, absorbed = search.residual(index)
        if addition is not None and terms.graph.numel(addition.key) != 1:
            for inner in absorbed:
                found.pop(inner, None)
                search.streams.pop((inner, 0), None)
            found[index] = addition
            search.streams[addition.key] = addition.stream
    return list(found.values()), search.streams


_APART = 4
"""Of the states of a walk one in so many is remembered: a walk down the same streams is at one of them soon enough."""

_Meeting = tuple[Key, int, int]
"""Where operands meet: the tensor, and bit masks of the operands that come from it lightly only, or heavily."""


class _Search:
    """Looks at one sum after the other, in execution order."""

    def __init__(self, terms: Terms) -> None:
        self.streams: dict[Key, Key] = {}
        self._terms = terms
        self._met: dict[tuple[tuple[Key, tuple[int, int]], ...], _Meeting | None] = {}

    def residual(self, index: int) -> tuple[Addition | None, set[int]]:
        """A sum as a residual addition, if need be together with a sum inside it that nothing else reads."""
        operands = self._terms.of(index)
        if len(operands) < 2:
            return None, set()
        found = self._split(index, operands)
        if found is not None:
            return found, set()
        expanded, absorbed = _expanded(self._terms, operands)
        found = self._split(index, expanded) if absorbed else None
        if found is not None and len(found.shortcuts) + len(found.branches) == len(expanded):
            return found, absorbed
        return None, set()

    def _split(self, index: int, operands: tuple[Term, ...]) -> Addition | None:
        """The operands by sides of the tensor where they meet."""
        meeting = self._meeting(operands)
        if meeting is None:
            return None
        key, *masks = meeting
        shortcuts, branches = (tuple(t for i, t in enumerate(operands) if mask >> i & 1) for mask in masks)
        return Addition(index, key, shortcuts, branches)

    def _meeting(self, operands: tuple[Term, ...]) -> _Meeting | None:
        """Walk back from all operands at once, latest tensor first, to where a light and a heavy path meet."""
        reached: dict[Key, tuple[int, int]] = {}
        queue: list[tuple[int, int]] = []
        for position, operand in enumerate(operands):
            for key in operand.keys:
                _reach(reached, queue, key, (0, 1 << position) if operand.is_product else (1 << position, 0))
        states = []
        met: _Meeting | None = None
        while any(light for light, _ in reached.values()) and met is None:
            # Two paths down the same streams were followed before: from here on the answer is known.
            if len(reached) <= 2:
                state = tuple(sorted(reached.items()))
                if state in self._met:
                    met = self._met[state]
                    break
                states.append(state)
            met = self._step(reached, queue)
        self._met.update(dict.fromkeys(states[::_APART], met))
        return met

    def _step(self, reached: dict[Key, tuple[int, int]], queue: list[tuple[int, int]]) -> _Meeting | None:
        """Go back across the latest tensor reached, unless the operands meet there."""
        position, output = heapq.heappop(queue)
        key = (-position, -output)
        light, heavy = reached.pop(key)
        shortcuts = light & ~heavy
        if shortcuts and heavy:
            return key, shortcuts, heavy
        through = (0, light | heavy) if self._terms.graph.is_heavy(key[0]) else (light, heavy)
        for source in sources(self._terms, key, self.streams):
            _reach(reached, queue, source, through)
        return None


def _reach(reached: dict[Key, tuple[int, int]], queue: list[tuple[int, int]], key: Key, by: tuple[int, int]) -> None:
    if key not in reached:
        heapq.heappush(queue, (-key[0], -key[1]))
    light, heavy = reached.get(key, (0, 0))
    reached[key] = (light | by[0], heavy | by[1])


def _expanded(terms: Terms, operands: tuple[Term, ...]) -> tuple[tuple[Term, ...], set[int]]:
    """Operands with sums that nothing else reads replaced by their own operands."""
    graph = terms.graph
    result: list[Term] = []
    absorbed: set[int] = set()
    for operand in operands:
        key, factors = operand.keys[0], operand.factors
        while len(operand.keys) == 1 and not operand.is_product and len(graph.readers[key]) == 1:
            inner = terms.of(key[0]) if graph.names[key[0]] in ADDITIONS else ()
            if len(inner) > 1:
                absorbed.add(key[0])
                result += [replace(term, factors=factors + term.factors) for term in inner]
                break
            step = terms.scale(key[0])
            if step is None:
                result.append(operand)
                break
            key, factors = step[0], factors + step[1]
        else:
            result.append(operand)
    return tuple(result), absorbed
