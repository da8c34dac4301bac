"""Residual additions of an autograd graph: which sums join a shortcut and a branch, and at which stream tensor they part.

A sum is residual if, back to one common tensor, one operand passes no product of matrices, convolution, embedding or
attention and another passes at least one. That leaves out rotary positions, epsilons, activations, masks, biases and
position embeddings. Found additions are crossed along their shortcut afterwards, so that what lies inside an earlier
branch (a position bias that all layers share, say) is not taken for a stream. Reads `keelscope.graph`.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from keelscope.graph import ADDITIONS, FUSED_ADDITIONS, Graph, Key

__all__ = ["Addition", "Factor", "Norm", "Term", "Terms", "residual_additions", "sources"]

_GATES = frozenset({"Sigmoid", "Hardsigmoid", "Softmax"})


@dataclass(frozen=True, slots=True)
class Factor:
    """A weight on a term: a number, or an operand of a node that `keelscope.coefficients` reads on demand."""

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
        self._carried: dict[int, tuple[Key, ...]] = {}
        self._constant: dict[Key, bool] = {}

    def of(self, index: int) -> tuple[Term, ...]:
        """The operands of a sum that depend on data."""
        return tuple(term for term in self._operands(index) if term.keys)

    def carried(self, index: int) -> tuple[Key, ...]:
        """The inputs of a node through which data passes: all, but for a product with a smaller tensor or a gate."""
        known = self._carried.get(index)
        if known is None:
            keys = tuple(key for key, _ in self._scaled(index)) or self.graph.inputs[index]
            known = tuple(key for key in keys if key is not None and not self.is_parameter(key))
            self._carried[index] = known
        return known

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
        known = self._constant.get(key)
        if known is None:
            known = self._constant[key] = self._leads_to_parameter(key)
        return known

    def _leads_to_parameter(self, key: Key) -> bool:
        graph = self.graph
        while True:
            leaf = graph.leaf(key)
            if leaf is not None:
                return id(leaf) in self._parameters
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
        graph, node, name = self.graph, self.graph.nodes[index], self.graph.names[index]
        first, second = self._term(index, 0), self._term(index, 1)
        # Plain numbers kept by a node are no saved tensors: reading them runs nothing.
        if name in {"Add", "Sub", "Rsub"}:
            alpha = float(getattr(node, "_saved_alpha", 1))
            weights = {"Add": (1.0, alpha), "Sub": (1.0, -alpha), "Rsub": (-alpha, 1.0)}[name]
            return _weighted(first, weights[0]), _weighted(second, weights[1])
        if name in FUSED_ADDITIONS:
            product = Term(tuple(key for key in graph.inputs[index][1:] if key is not None), is_product=True)
            return _weighted(first, float(node._saved_beta)), _weighted(product, float(node._saved_alpha))  # type: ignore[attr-defined]
        if name == "Lerp":
            return self._lerp(index, first, second)
        if name == "Addcmul":
            return first, self._product(index, float(node._saved_value))  # type: ignore[attr-defined]
        return (
            tuple(replace(term, factors=(Factor(),)) for term in (first, second))
            if len(graph.inputs[index]) == 2
            else ()
        )

    def _lerp(self, index: int, start: Term, end: Term) -> tuple[Term, ...]:
        node = self.graph.nodes[index]
        if len(self.graph.inputs[index]) == 2:
            weight = float(node._saved_weight)  # type: ignore[attr-defined]
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
        if name not in candidates or index in inside or terms.graph.numel((index, 0)) == 1:
            continue
        addition, absorbed = search.residual(index)
        if addition is not None:
            for inner in absorbed:
                found.pop(inner, None)
                search.streams.pop((inner, 0), None)
            found[index] = addition
            search.streams[addition.key] = addition.stream
    return list(found.values()), search.streams


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
        self._met.update(dict.fromkeys(states, met))
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
        while len(operand.keys) == 1 and not operand.is_product and len(graph.readers.get(key, ())) == 1:
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
