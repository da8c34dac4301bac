"""The sub-layers of one graph while it is alive: where stream, sum and branches lie, and the tensors that meet there.

`keelscope.paths` puts its hooks on these places. A `LiveGraph` holds the graph of one forward: let go of it when the
backward pass is over.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import Node

from keelscope.topology.additions import Addition
from keelscope.topology.graph import Graph, Key
from keelscope.topology.module_calls import ModuleCall
from keelscope.topology.recipes import Kept, Operands, Recipe, Weigh
from keelscope.topology.records import Sublayer
from keelscope.topology.squashing import Source
from keelscope.topology.terms import Factor, Term, Terms
from keelscope.topology.trails import Trails

__all__ = [
    "LiveGate",
    "LiveGraph",
    "LiveOutput",
    "LiveSublayer",
    "Operands",
    "Places",
    "Recipes",
    "of_additions",
    "of_declared",
]


@dataclass(frozen=True, slots=True)
class LiveSublayer:
    """One residual sub-layer by its tensors in the graph."""

    index: int
    """Position among the sub-layers of the topology."""
    entering: Key
    """The stream tensor x that shortcut and branch read."""
    leaving: Key
    """The stream tensor after the sub-layer, behind its norm."""
    branches: tuple[Key, ...]
    """The branch's outputs, weights excluded: cutting them leaves the shortcut alone."""
    addition: Addition | None = None
    """The sum, for sub-layers that the graph shows."""


@dataclass(frozen=True, slots=True)
class LiveOutput:
    """What a module that is called a gate has put out."""

    path: str
    node: Node
    output: int
    """Which of the node's outputs it is."""
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class LiveGate:
    """A weight that depends on data, in the graph of one forward."""

    source: Source
    node: Node
    """The node that put out ``source.key``."""
    weights: Tensor | None
    """The weights, detached; None if they cannot be read."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the sub-layers lie in graphs of one shape; the nodes of none of them are held."""

    sublayers: tuple[LiveSublayer, ...]
    further: tuple[LiveSublayer, ...]
    """Sums that take the branches of sub-layers up into another stream."""
    recipes: tuple[Recipe | None, ...]
    """For each of the sub-layers, how to get at its operands."""
    worked_out: dict[str, object] = field(default_factory=dict)
    """What others have worked out on the first graph of this shape, for those that come later."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveGraph:
    """A graph with its sub-layers."""

    places: Places
    nodes: Sequence[Node]
    """Each after all nodes it takes its inputs from."""
    tensors: Mapping[Key, Tensor]
    """What modules took and gave, as far as it was kept, in the graph."""
    weigh: Weigh
    """Reads weights."""
    graph: Graph | None = None
    """The whole graph; None where one of the same shape was read before, with the same places."""

    @property
    def sublayers(self) -> tuple[LiveSublayer, ...]:
        """Where they lie."""
        return self.places.sublayers

    def operands(self) -> Iterator[tuple[LiveSublayer, Operands]]:
        """The tensors that meet in the sums.

        Yields:
            Each sub-layer of which all are still there, and their weights can be read.
        """
        recipes = self.places.recipes
        plain = self.tensors.plain(recipes) if isinstance(self.tensors, Kept) else [None] * len(recipes)
        for sublayer, recipe, found in zip(self.places.sublayers, recipes, plain, strict=True):
            met = found if found or recipe is None else recipe.operands(self.tensors, self.weigh)
            if met is not None:
                yield sublayer, met


class Recipes:
    """Finds out how to get at operands.

    Args:
        trails: follows tensors through the graph.
        terms: takes expressions apart.
        kept: tensors that were kept.
    """

    def __init__(self, trails: Trails, terms: Terms, kept: Container[Key]) -> None:
        self._trails = trails
        self._terms = terms
        self._kept = kept

    def of(self, sublayer: LiveSublayer) -> Recipe | None:
        """The recipe for one sub-layer.

        Args:
            sublayer: the sub-layer.

        Returns:
            Its recipe; None where the graph does not show the sum, or more than weights is on the shortcut.
        """
        addition = sublayer.addition
        if addition is None or addition.stream not in self._kept:
            return None
        shortcuts = [self._shortcut(term, addition.stream) for term in addition.shortcuts]
        known = tuple(factors for factors in shortcuts if factors is not None)
        if len(known) < len(shortcuts):
            return None
        parts = [self._operand(term) for term in addition.branches]
        found = tuple(part for part in parts if part is not None)
        branch = found if len(found) == len(parts) else ()
        return Recipe(addition.stream, self._narrowest(sublayer, addition), known, branch, addition.key)

    def _narrowest(self, sublayer: LiveSublayer, addition: Addition) -> torch.dtype:
        """The type in which the sum is kept: its own, or a narrower one it is cast to before anything else is done."""
        graph = self._terms.graph
        found = [graph.dtype(addition.key)]
        if graph.origin(sublayer.leaving)[0] == addition.root:
            found.append(graph.dtype(sublayer.leaving))
        return min(found, key=lambda dtype: torch.finfo(dtype).bits)

    def _shortcut(self, term: Term, stream: Key) -> tuple[Factor, ...] | None:
        trail = self._trails.back(term.keys, stream)
        return None if trail is None or trail.norms or trail.others else (*term.factors, *trail.factors())

    def _operand(self, term: Term) -> tuple[Key, tuple[Factor, ...]] | None:
        """A branch as it enters the sum: the nearest kept tensor behind it, and the weights between."""
        if term.is_product or len(term.keys) != 1:
            return None
        key, factors = term.keys[0], list[Factor](term.factors)
        while key not in self._kept:
            step = None if key in self._terms.norms or key in self._trails.streams else self._terms.scale(key[0])
            if step is None:
                return None
            key = step[0]
            factors += step[1]
        return key, tuple(factors)


def of_additions(
    records: Iterable[Sublayer], found: Mapping[int, tuple[Addition, Key]], trails: Trails
) -> list[LiveSublayer]:
    """The sub-layers that a graph shows.

    Args:
        records: of the topology.
        found: by number of the record, its addition and the stream tensor after it.
        trails: follows tensors through the graph.

    Returns:
        Those of the records that are found.
    """
    live = []
    for record in records:
        if record.number in found and not record.is_declared:
            addition, leaving = found[record.number]
            ends = [term.keys if term.is_product else trails.branch_end(term).keys[-1:] for term in addition.branches]
            cut = tuple(key for keys in ends for key in keys)
            live.append(LiveSublayer(record.index, addition.stream, leaving, cut, addition))
    return live


def of_declared(records: Iterable[Sublayer], calls: Sequence[ModuleCall]) -> list[LiveSublayer]:
    """The sub-layers that modules declare: the stream is what the module named ``site`` takes (the last of several
    tensors) and gives.

    Args:
        records: of the topology.
        calls: module calls in the order in which they ended.

    Returns:
        Those of the records whose modules took and gave a tensor with a gradient.
    """
    first: dict[str, ModuleCall] = {}
    for call in calls:
        first.setdefault(call.path, call)
    live = []
    for record in records:
        around, inside = first.get(record.site or ""), first.get(record.branch or "")
        if record.is_declared and around is not None and inside is not None and around.inputs:
            live.append(LiveSublayer(record.index, around.inputs[-1], around.outputs[0], inside.outputs[:1]))
    return live
