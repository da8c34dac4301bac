"""What the graph of a forward does not show of the residual structure, as sentences for the reader of a topology.

A sum that joins two heavy paths where a stream starts, a first sub-layer whose input needs no gradient, regions hidden
by a reentrant checkpoint: `keelscope.topology.reading` lists them instead of guessing.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence

from keelscope.topology.additions import Addition
from keelscope.topology.graph import ADDITIONS, Key
from keelscope.topology.module_calls import Surroundings
from keelscope.topology.terms import Term, Terms, sources
from keelscope.topology.trails import Trails

__all__ = ["Gaps"]

_DIGITS = re.compile(r"\d+")
_LOOKUPS = frozenset({"Embedding", "EmbeddingBag"})


class Gaps:
    """Looks for what could not be read.

    Args:
        terms: the graph and how to take it apart.
        trails: follows tensors through it.
        around: which module a node lies in.
    """

    def __init__(self, terms: Terms, trails: Trails, around: Surroundings) -> None:
        self._terms = terms
        self._trails = trails
        self._around = around

    def reasons(self, additions: Sequence[Addition]) -> list[str]:
        """One sentence per gap.

        Args:
            additions: the residual additions found.

        Returns:
            Sentences in execution order, hidden regions first.
        """
        found = list(self.hidden().values())
        places = {_role(self._place(addition.root)) for addition in additions}
        for start in dict.fromkeys(addition.stream for addition in additions):
            index = self._sum_before(start)
            if index is not None:
                found += self._start(index, places)
        return list(dict.fromkeys(found))

    def hidden(self) -> dict[int, str]:
        """Nodes that hide a part of the model, with a sentence each."""
        graph = self._terms.graph
        return {
            index: f"{self._named(index)}: {name} hides its operations from the graph, and with them sub-layers inside."
            for index, name in enumerate(graph.names)
            if graph.is_opaque(index)
        }

    def _sum_before(self, start: Key) -> int | None:
        """The sum that a stream starts from, if it is no residual addition that was found."""
        graph, key = self._terms.graph, start
        while key not in self._trails.streams:
            inputs = graph.inputs[key[0]]
            if graph.names[key[0]] in ADDITIONS and (None in inputs or len(self._terms.of(key[0])) > 1):
                return key[0]
            came = sources(self._terms, key, self._trails.streams)
            if graph.is_heavy(key[0]) or len(came) != 1:
                return None
            key = came[0]
        return None

    def _start(self, index: int, places: set[str]) -> Iterator[str]:
        operands = self._terms.of(index)
        if len(operands) > 1:
            common = self._common(operands)
            if common is not None:
                yield (
                    f"{self._named(index)}: both operands of a sum pass a product of matrices or a convolution "
                    "(a projection on the shortcut); it is not counted as a sub-layer."
                )
        elif _role(self._place(index)) in places and operands and self._is_computed(operands[0].keys[0]):
            yield (
                f"{self._named(index)}: one operand of a sum needs no gradient; if it is the input of the model, a "
                "first sub-layer is missing."
            )

    def _common(self, operands: Sequence[Term]) -> Key | None:
        """The latest tensor that all operands are computed from."""
        everyone = (1 << len(operands)) - 1
        reached: dict[Key, int] = {}
        for position, operand in enumerate(operands):
            for key in operand.keys:
                reached[key] = reached.get(key, 0) | 1 << position
        queue = [(-key[0], -key[1]) for key in reached]
        heapq.heapify(queue)
        while queue:
            position, output = heapq.heappop(queue)
            key = (-position, -output)
            mask = reached[key]
            if mask == everyone:
                return key
            for source in sources(self._terms, key, self._trails.streams):
                if source not in reached:
                    heapq.heappush(queue, (-source[0], -source[1]))
                reached[source] = reached.get(source, 0) | mask
        return None

    def _is_computed(self, key: Key) -> bool:
        """Whether a tensor comes out of a product of matrices, not straight from a table of embeddings."""
        graph = self._terms.graph
        while not graph.is_heavy(key[0]):
            came = sources(self._terms, key, self._trails.streams)
            if len(came) != 1:
                return False
            key = came[0]
        return graph.names[key[0]] not in _LOOKUPS

    def _place(self, index: int) -> str:
        return self._around.path(self._terms.graph, index)

    def _named(self, index: int) -> str:
        return self._place(index) or "the model"


def _role(path: str) -> str:
    return _DIGITS.sub("#", path)
