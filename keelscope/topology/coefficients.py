"""The weights on shortcut and branch: what kind each is, its value, and the parameter behind it.

`keelscope.topology.additions` says which operands of which nodes the weights are; they are read here, once, while the
graph is alive. What a node saved is read only where no hook would run (an activation checkpoint runs the user's forward
again); otherwise a value comes from the parameter itself or stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from keelscope.topology.graph import Key
from keelscope.topology.held import Own
from keelscope.topology.module_calls import CallSites
from keelscope.topology.readable import is_mask, is_readable, mean, saved
from keelscope.topology.recipes import kept
from keelscope.topology.squashing import Source, settled, trace
from keelscope.topology.terms import Factor, Terms

__all__ = ["ONE", "UNKNOWN", "Coefficient", "Coefficients", "product", "total"]

_RANK = ("one", "constant", "buffer", "learnable scalar", "learnable vector", "gate (token)", "unknown")
_LOOKUPS = frozenset({"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather"})
_MOST_NODES = 200


@dataclass(frozen=True, slots=True)
class Coefficient:
    """The weight a or b in ``a x + b F(x)``."""

    kind: str = "one"
    """one, constant, buffer, learnable scalar, learnable vector, gate (token) (depends on the data), or unknown."""
    value: float | None = 1.0
    """Its value at the recorded step, of several entries the mean; None if it cannot be read."""
    parameter: str | None = None
    """Path of the parameter or buffer it is computed from, the first one if there are several."""
    site: str | None = None
    """Path of the module whose output it is, if any."""
    source: Source | None = field(default=None, compare=False, repr=False)
    """What a learned weight is computed from, number by number."""
    parts: tuple[Coefficient, ...] = field(default=(), compare=False, repr=False)
    """The weights that it is the product of, plain numbers left out, where there are several."""

    @property
    def is_one(self) -> bool:
        """Whether the weight is exactly 1 and fixed."""
        return self.kind == "one"

    @property
    def depends_on_data(self) -> bool:
        """Whether the weight is computed from the stream or from other data."""
        return self.kind.startswith("gate")


ONE = Coefficient()
"""No weight."""
UNKNOWN = Coefficient("unknown", None)
"""A weight that could not be read."""


def product(coefficients: Sequence[Coefficient]) -> Coefficient:
    """The product of weights: the value if all are known, the kind of the least simple one.

    Args:
        coefficients: the weights.

    Returns:
        One weight.

    Example:
        >>> product([Coefficient("constant", 2.0), Coefficient("learnable scalar", 0.5, "alpha")])
        Coefficient(kind='learnable scalar', value=1.0, parameter='alpha', site=None)
    """
    values = [coefficient.value for coefficient in coefficients]
    return _joined(coefficients, None if None in values else math.prod(value for value in values if value is not None))


def total(coefficients: Sequence[Coefficient]) -> Coefficient:
    """The sum of weights on the same tensor.

    Args:
        coefficients: the weights, at least one.

    Returns:
        One weight.

    Example:
        >>> total([Coefficient(), Coefficient("constant", -0.25)])
        Coefficient(kind='constant', value=0.75, parameter=None, site=None)
    """
    if len(coefficients) == 1:
        return coefficients[0]
    values = [coefficient.value for coefficient in coefficients]
    return _joined(coefficients, None if None in values else math.fsum(value for value in values if value is not None))


def _joined(coefficients: Sequence[Coefficient], value: float | None) -> Coefficient:
    kind = max((coefficient.kind for coefficient in coefficients), key=_RANK.index, default="one")
    found = [part for coefficient in coefficients for part in coefficient.parts or (coefficient,)]
    parts = tuple(part for part in found if part.kind not in {"one", "constant", "unknown"})
    if kind == "unknown":
        return replace(UNKNOWN, parts=parts)
    if kind in {"one", "constant"}:
        return ONE if value == 1.0 else Coefficient("constant", value)
    leading = next(coefficient for coefficient in coefficients if coefficient.kind == kind)
    return replace(leading, value=value, parts=parts if len(parts) > 1 else ())


class Coefficients:
    """Reads weights of one graph.

    Args:
        terms: the graph and how to take it apart.
        model: the model, for the names of fixed tensors.
        sites: which modules took and gave which tensor.
        dropped: tensors that a dropout module put out.
        in_place: weights of in-place sums by node and input, as far as they are known.
        own: the parameters of the model.
        beside: names of those that modules hold during their forward only, by identity.
    """

    def __init__(
        self,
        terms: Terms,
        model: nn.Module,
        sites: CallSites,
        dropped: set[Key],
        in_place: Mapping[tuple[int, int], float],
        own: Own,
        beside: Mapping[int, str],
    ) -> None:
        self._terms = terms
        self._sites = sites
        self._dropped = dropped
        self._in_place = in_place
        self._known: dict[Factor, Coefficient] = {}
        self._own, self._beside = own, beside
        fixed = [*model.named_buffers(), *((name, p) for name, p in model.named_parameters() if not p.requires_grad)]
        self._fixed = {tensor.data_ptr(): name for name, tensor in fixed if is_readable(tensor)}

    def of(self, factors: Sequence[Factor]) -> Coefficient:
        """The product of factors as one weight; factors that drop entries at random count as 1."""
        return product([self.read(factor) for factor in factors])

    def read(self, factor: Factor) -> Coefficient:
        """One factor as a weight."""
        if not factor.saved:
            value = factor.value if factor.node < 0 else self._in_place.get((factor.node, factor.slot))
            return UNKNOWN if value is None else product([Coefficient("constant", value)])
        if factor not in self._known:
            self._known[factor] = self._read(factor)
        return self._known[factor]

    def entries(self, factor: Factor) -> Tensor | float | None:
        """A factor entry by entry, dropout masks included.

        Args:
            factor: the weight; asked before a backward pass frees what nodes saved.

        Returns:
            A number, or a tensor that broadcasts against what the factor scales; None if it cannot be read.
        """
        found = kept(self._terms.graph.nodes, factor)
        if found is not None:
            return found
        if not factor.saved:
            return self._in_place.get((factor.node, factor.slot))
        return self.read(factor).value if self.read(factor).kind in {"one", "learnable scalar"} else None

    def _read(self, factor: Factor) -> Coefficient:
        graph = self._terms.graph
        key = graph.inputs[factor.node][factor.slot] if factor.slot < len(graph.inputs[factor.node]) else None
        saved = self._saved(factor)
        found = self._fixed_weight(factor, saved) if key is None else self._learned(key, saved)
        if found.value is None:
            return found
        value = found.value
        if factor.inverse:
            value = math.inf if value == 0 else 1 / value
        elif factor.complement:
            value = 1 - value
        if found.kind == "one" and value != 1:
            return Coefficient("constant", value)
        return replace(found, value=value)

    def _saved(self, factor: Factor) -> Tensor | None:
        return saved(self._terms.graph.nodes[factor.node], factor.saved)

    def _fixed_weight(self, factor: Factor, saved: Tensor | None) -> Coefficient:
        """A weight that needs no gradient: a number, a buffer, a frozen parameter or a dropout mask."""
        if (factor.node, 0) in self._dropped:
            return Coefficient()
        if saved is None:
            return UNKNOWN
        name = self._fixed.get(saved.data_ptr())
        if name is not None:
            return Coefficient("buffer", mean(saved), name)
        if saved.numel() > 1 and is_mask(saved):
            return Coefficient()
        value = mean(saved)
        return Coefficient() if value == 1.0 and saved.numel() == 1 else Coefficient("constant", value)

    def _learned(self, key: Key, saved: Tensor | None) -> Coefficient:
        graph = self._terms.graph
        leaf = graph.leaf(graph.origin(key)) if saved is None else saved
        value = None if leaf is None else mean(leaf.detach())
        names, depends = self._leaves(key)
        name = next(filter(None, names), None)
        if not names and not depends:
            return UNKNOWN
        kind = "gate (token)" if depends else "learnable scalar" if graph.numel(key) == 1 else "learnable vector"
        return Coefficient(kind, value, name, self._sites.maker(key), self._source(key, saved))

    def _source(self, key: Key, saved: Tensor | None) -> Source:
        source = trace(self._terms.graph, key, self._sites.only_maker, self._constant)
        raw = self._terms.graph.leaf(source.key)
        readable = raw is not None and is_readable(raw)
        return replace(source, steps=settled(source.steps, raw if readable else None, saved))

    def _constant(self, node: int, slot: int, saved: str) -> float | None:
        """The one number that a node multiplies with."""
        number = self._saved(Factor(node=node, slot=slot, saved=saved))
        return float(number) if number is not None and number.numel() == 1 else None

    def live(self) -> list[tuple[Source, Tensor | None]]:
        """Where weights come from that no parameter alone gives, and the weights; asked before a backward pass."""
        found = [(factor, known.source, known.depends_on_data) for factor, known in self._known.items()]
        return [
            (source, self._saved(factor))
            for factor, source, depends in found
            if source is not None and (depends or source.module is not None)
        ]

    def _name(self, leaf: Tensor) -> str | None:
        """Name of a leaf, empty for a parameter of nobody; None for data."""
        known = self._own.names.get(id(leaf)) if id(leaf) in self._own else self._beside.get(id(leaf))
        return "" if known is None and isinstance(leaf, nn.Parameter) else known

    def _leaves(self, key: Key) -> tuple[list[str], bool]:
        """Parameters behind a tensor, nearest first, and whether data is behind it too."""
        graph = self._terms.graph
        names: dict[str, None] = {}
        queue, seen, depends = [key], {key}, False
        for current in queue:
            leaf = graph.leaf(current)
            if leaf is not None:
                name = self._name(leaf)
                depends |= name is None
                names.update({} if name is None else {name: None})
                continue
            inputs = graph.inputs[current[0]]
            depends |= graph.names[current[0]] in _LOOKUPS or (graph.is_heavy(current[0]) and None in inputs[:2])
            depends |= len(queue) > _MOST_NODES
            if depends and names:
                break
            fresh = [source for source in inputs if source is not None and source not in seen]
            seen.update(fresh)
            queue.extend(fresh)
        return list(names), depends
