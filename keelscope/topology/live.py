"""The sub-layers of one graph while it is alive: where stream, sum and branches lie, and the tensors that meet there.

`keelscope.paths` puts its hooks on these places. A `LiveGraph` holds the graph of one forward: let go of it when the
backward pass is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from keelscope.topology.additions import Addition
from keelscope.topology.coefficients import Coefficients
from keelscope.topology.graph import Graph, Key
from keelscope.topology.module_calls import ModuleCall
from keelscope.topology.records import Sublayer
from keelscope.topology.squashing import Source
from keelscope.topology.terms import Factor, Term, Terms
from keelscope.topology.trails import Trails

__all__ = ["LiveGate", "LiveGraph", "LiveOutput", "LiveSublayer", "Operands", "of_additions", "of_declared"]


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
class Operands:
    """What meets in a residual sum, detached."""

    stream: Tensor
    """x."""
    shortcut: Tensor
    """a x, in the type in which the model adds."""
    branch: Tensor
    """b F, in the same type."""


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


class LiveGraph:
    """A graph with its sub-layers.

    Args:
        sublayers: where they lie.
        further: sums that take the branches of sub-layers up into another stream.
        trails: follows tensors through the graph.
        terms: takes expressions apart.
        weights: reads weights.
        tensors: what modules took and gave, as far as it was kept.
    """

    def __init__(
        self,
        sublayers: Sequence[LiveSublayer],
        further: Sequence[LiveSublayer],
        trails: Trails,
        terms: Terms,
        weights: Coefficients,
        tensors: Mapping[Key, Tensor],
    ) -> None:
        self.graph: Graph = terms.graph
        self.sublayers = tuple(sublayers)
        self.further = tuple(further)
        self._trails = trails
        self._terms = terms
        self._weights = weights
        self._tensors = tensors

    def operands(self, sublayer: LiveSublayer) -> Operands | None:
        """The tensors that meet in the sum of a sub-layer.

        Args:
            sublayer: one of `sublayers`.

        Returns:
            The operands; None if one of them is no longer there, or its weight cannot be read.
        """
        addition = sublayer.addition
        stream = self._tensors.get(sublayer.entering)
        if addition is None or stream is None:
            return None
        dtype = self._narrowest(sublayer)
        weight = self._shortcut_weight(addition)
        shortcut = None if weight is None else (stream.to(dtype) * weight).to(dtype)
        branch = None if shortcut is None else self._branch(addition, shortcut)
        if shortcut is None or branch is None or shortcut.shape != stream.shape or branch.shape != stream.shape:
            return None
        return Operands(stream, shortcut, branch.to(dtype))

    def _narrowest(self, sublayer: LiveSublayer) -> torch.dtype:
        """The type in which the sum is kept: its own, or a narrower one it is cast to before anything else is done."""
        found = [self.graph.dtype((sublayer.addition.root, 0))] if sublayer.addition is not None else []
        if self.graph.origin(sublayer.leaving)[0] == (sublayer.addition.root if sublayer.addition else -1):
            found.append(self.graph.dtype(sublayer.leaving))
        return min(found, key=lambda dtype: torch.finfo(dtype).bits)

    def _shortcut_weight(self, addition: Addition) -> Tensor | float | None:
        total: Tensor | float = 0.0
        for term in addition.shortcuts:
            trail = self._trails.back(term.keys, addition.stream)
            if trail is None or trail.norms or trail.others:
                return None
            weight = self._weights.entries([*term.factors, *trail.factors()])
            if weight is None:
                return None
            total = total + weight
        return total

    def _branch(self, addition: Addition, shortcut: Tensor) -> Tensor | None:
        parts = [self._operand(term) for term in addition.branches]
        known = [part for part in parts if part is not None]
        if known and len(known) == len(parts):
            return known[0] if len(known) == 1 else sum(known[1:], known[0])
        total = self._tensors.get(addition.key)
        # Of a narrow type, what is left of the branch in the sum is rounding.
        precise = total is not None and total.element_size() >= 4 and total.shape == shortcut.shape
        return total - shortcut if total is not None and precise else None

    def _operand(self, term: Term) -> Tensor | None:
        """A branch as it enters the sum: the nearest kept tensor behind it, times the weights between."""
        if term.is_product or len(term.keys) != 1:
            return None
        key, factors = term.keys[0], list[Factor](term.factors)
        while key not in self._tensors:
            step = None if key in self._terms.norms or key in self._trails.streams else self._terms.scale(key[0])
            if step is None:
                return None
            key = step[0]
            factors += step[1]
        weight = self._weights.entries(factors)
        return None if weight is None else self._tensors[key] * weight


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
