"""Expressions of an autograd graph taken apart: operands of sums, and what a product carries and what it is scaled by.

A factor is where a weight stands, not its value: `keelscope.topology.coefficients` reads it. The search for residual
additions and everything that follows tensors through the graph goes through `Terms`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from torch import nn

from keelscope.topology.graph import ADDITIONS, FUSED_ADDITIONS, Graph, Key

__all__ = ["Factor", "Norm", "Term", "Terms", "sources"]

_GATES = frozenset({"Sigmoid", "Hardsigmoid", "Softmax"})
_BITS = 63


@dataclass(frozen=True, slots=True)
class Factor:
    """A weight on a term: a number, or an operand of a node that `keelscope.topology.coefficients` reads on demand."""

    value: float | None = None
    node: int = -1
    slot: int = -1
    """Which input of the node the weight is."""
    saved: str = ""
    """Attribute under which the node keeps it."""
    inverse: bool = False
    complement: bool = False
    """Whether the weight is one minus the operand (torch.lerp)."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation that is crossed in one step."""

    path: str
    source: Key | None
    kind: str = "n"
    """n, or d for a tanh that stands for a norm."""


@dataclass(frozen=True, slots=True)
class Term:
    """One operand of a sum."""

    keys: tuple[Key, ...]
    factors: tuple[Factor, ...] = ()
    is_product: bool = False
    """Whether the operand is the product of matrices of its tensors (torch.addmm)."""


class Terms:
    """How expressions of a graph are taken apart: operands of sums, what a product carries and what it is scaled by.

    Args:
        graph: the graph.
        parameters: ids of the model's parameters, which are never a stream.
        norms: normalisations by output tensor.
    """

    def __init__(self, graph: Graph, parameters: Container[int], norms: Mapping[Key, Norm]) -> None:
        self.graph = graph
        self.norms = norms
        self._parameters = parameters
        self._carried = array("q", [-1]) * len(graph.nodes)
        """Per node a bit for each input that is carried, -1 where nobody has asked."""
        self._constant = bytearray(len(graph.nodes))
        """Whether the first output of a node is a parameter: 0 where nobody has asked, or one more than the answer."""
        self._further: dict[Key, bool] = {}
        """The same of other outputs."""

    def of(self, index: int) -> tuple[Term, ...]:
        """The operands of a sum that depend on data."""
        return tuple(term for term in self._operands(index) if term.keys)

    def carried(self, index: int) -> tuple[Key, ...]:
        """The inputs of a node through which data passes: all, but for a product with a smaller tensor or a gate."""
        inputs, bits = self.graph.inputs[index], self._carried[index]
        if bits >= 0:
            return tuple([key for slot, key in enumerate(inputs) if key is not None and bits >> slot & 1])
        scaled = [0 if weight.slot < 0 else 1 - weight.slot for _, (weight, *_) in self._scaled(index)]
        slots = [slot for slot in scaled or range(len(inputs)) if self._is_data(inputs[slot])]
        if len(inputs) < _BITS:
            self._carried[index] = sum(1 << slot for slot in slots)
        return tuple([key for slot in slots if (key := inputs[slot]) is not None])

    def _is_data(self, key: Key | None) -> bool:
        return key is not None and not self.is_parameter(key)

    def scale(self, index: int) -> tuple[Key, tuple[Factor, ...]] | None:
        """What a node scales, and by what: casts and views by nothing, products by their other operand.

        Args:
            index: the node.

        Returns:
            The tensor that is scaled and the weights; None if the node does anything else.
        """
        graph = self.graph
        if graph.is_transparent(index):
            source = graph.inputs[index][0]
            return None if source is None else (source, ())
        scaled = self._scaled(index)
        if len(scaled) == 1:
            return scaled[0]
        if graph.names[index] in ADDITIONS and len(terms := self.of(index)) == 1 and len(terms[0].keys) == 1:
            return terms[0].keys[0], terms[0].factors
        return None

    def is_parameter(self, key: Key) -> bool:
        """Whether a tensor is computed from one parameter of the model and nothing else."""
        index, output = key
        if output:
            if key not in self._further:
                self._further[key] = self._leads_to_parameter(key)
            return self._further[key]
        if not self._constant[index]:
            self._constant[index] = 1 + self._leads_to_parameter(key)
        return self._constant[index] > 1

    def _leads_to_parameter(self, key: Key) -> bool:
        graph = self.graph
        while True:
            leaf = graph.leaf(key)
            if leaf is not None:  # FSDP computes with parameters of its own
                return id(leaf) in self._parameters or isinstance(leaf, nn.Parameter)
            sources = [source for source in graph.inputs[key[0]] if source is not None]
            if len(sources) != 1 or graph.is_heavy(key[0]):
                return False
            key = sources[0]

    def _scaled(self, index: int) -> list[tuple[Key, tuple[Factor, ...]]]:
        """The operands of a product that are carried, each with the other as its weight."""
        graph, name = self.graph, self.graph.names[index]
        inputs = graph.inputs[index]
        if name == "Neg":
            return [(key, (Factor(-1.0),)) for key in inputs if key is not None]
        if name == "Mul":
            pairs = ((0, 1, "_saved_other"), (1, 0, "_saved_self")) if len(inputs) == 2 else ((0, 1, "_saved_other"),)
        elif name == "Div":
            pairs = ((0, 1, "_saved_other"),)
        else:
            return []
        carriers = {slot for slot, other, _ in pairs if inputs[slot] is not None and not self._modulates(index, slot)}
        return [
            (key, (Factor(node=index, slot=other, saved=saved, inverse=name == "Div"),))
            for slot, other, saved in pairs
            if slot in carriers and (key := inputs[slot]) is not None
        ]

    def _modulates(self, index: int, slot: int) -> bool:
        """Whether an operand of a product is the weight: smaller than the product, a parameter, or a gate."""
        key, other = (*self.graph.inputs[index], None)[slot], (*self.graph.inputs[index], None)[1 - slot]
        if key is None or other is None or self.graph.names[index] == "Div":
            return key is None
        whole, own, others = (_padded(self.graph.shape(k)) for k in ((index, 0), key, other))
        if own != others and (others == whole or _last(own) < _last(others) == _last(whole)):
            return True
        if self.is_parameter(key) != self.is_parameter(other):
            return self.is_parameter(key)
        return self._is_gate(key) and not self._is_gate(other)

    def _is_gate(self, key: Key) -> bool:
        """Whether a tensor is a sigmoid or softmax, or one minus it."""
        graph = self.graph
        while graph.names[key[0]] not in _GATES:
            sources = [source for source in graph.inputs[key[0]] if source is not None]
            linear = graph.is_transparent(key[0]) or graph.names[key[0]] in {"Rsub", "Neg", "Add", "Sub", "Mul"}
            if len(sources) != 1 or not linear:
                return False
            key = sources[0]
        return True

    def _operands(self, index: int) -> tuple[Term, ...]:
        graph, name = self.graph, self.graph.names[index]
        first, second = self._term(index, 0), self._term(index, 1)
        if name in {"Add", "Sub", "Rsub"}:
            alpha = self._number(index, "_saved_alpha", 1.0)
            weights = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0)}[name]
            return _weighted(first, weights[0]), _weighted(second, weights[1])
        if name in FUSED_ADDITIONS:
            product = Term(tuple(key for key in graph.inputs[index][1:] if key is not None), is_product=True)
            weights = self._number(index, "_saved_beta"), self._number(index, "_saved_alpha")
            return _weighted(first, weights[0]), _weighted(product, weights[1])
        if name == "Lerp":
            return self._lerp(index, first, second)
        if name == "Addcmul":
            return first, self._product(index, self._number(index, "_saved_value"))
        if len(graph.inputs[index]) != 2:
            return ()
        return tuple(replace(term, factors=(Factor(node=index, slot=i),)) for i, term in enumerate((first, second)))

    def _number(self, index: int, attribute: str, otherwise: float = math.nan) -> float:
        return float(self.graph.plain(index, attribute, otherwise))  # type: ignore[arg-type]

    def _lerp(self, index: int, start: Term, end: Term) -> tuple[Term, ...]:
        if len(self.graph.inputs[index]) == 2:
            weight = self._number(index, "_saved_weight")
            return _weighted(start, 1 - weight), _weighted(end, weight)
        factor = Factor(node=index, slot=2, saved="_saved_weight")
        return replace(start, factors=(replace(factor, complement=True),)), replace(end, factors=(factor,))

    def _product(self, index: int, value: float) -> Term:
        """The product inside torch.addcmul."""
        inputs = self.graph.inputs[index]
        sizes = [None if key is None else _padded(self.graph.shape(key)) for key in inputs]
        whole = _padded(self.graph.shape((index, 0)))
        keys, factors = [], [Factor(value)]
        for slot, other in ((1, 2), (2, 1)):
            key = inputs[slot]
            if key is None or self.is_parameter(key) or (sizes[slot] != whole and sizes[other] == whole):
                factors.append(Factor(node=index, slot=slot, saved=f"_saved_tensor{slot}"))
            else:
                keys.append(key)
        return Term(tuple(keys), tuple(factors))

    def _term(self, index: int, slot: int) -> Term:
        inputs = self.graph.inputs[index]
        key = inputs[slot] if slot < len(inputs) else None
        return Term(() if key is None or self.is_parameter(key) else (key,))


def sources(terms: Terms, key: Key, streams: Mapping[Key, Key]) -> tuple[Key, ...]:
    """Where a tensor comes from: along the shortcut of a residual addition, across a norm, or the inputs of its node.

    Args:
        terms: the graph and how to take it apart.
        key: the tensor.
        streams: for each known residual sum the stream tensor it continues.

    Returns:
        Tensors.
    """
    if key in streams:
        return (streams[key],)
    norm = terms.norms.get(key)
    if norm is not None:
        return () if norm.source is None else (norm.source,)
    return terms.carried(key[0])


def _weighted(term: Term, value: float) -> Term:
    return term if value == 1.0 else replace(term, factors=(Factor(value),))


def _padded(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """A shape without leading ones."""
    if shape is None:
        return None
    start = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return shape[start:]


def _last(shape: tuple[int, ...] | None) -> int:
    return shape[-1] if shape else 1
