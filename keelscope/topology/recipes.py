"""How to get at what meets in a residual sum: which kept tensors, and what they are multiplied with.

A recipe names places of a graph, not its nodes, so that it serves for every graph of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from keelscope import kernel_residuals
from keelscope.topology.graph import Key
from keelscope.topology.readable import saved
from keelscope.topology.terms import Factor

__all__ = ["Kept", "Operands", "Order", "Recipe", "Weigh", "kept"]

Weigh = Callable[[Factor], Tensor | float | None]
"""A factor entry by entry, a tensor or a number; None if it cannot be read."""

_WHOLE: tuple[tuple[Factor, ...], ...] = ((),)


class Operands(NamedTuple):
    """What meets in a residual sum, in the graph."""

    stream: Tensor
    """x."""
    shortcut: Tensor
    """a x, in the type in which the model adds."""
    branch: Tensor
    """b F, in the same type."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Where the operands of one sum are."""

    stream: Key
    dtype: torch.dtype
    """In which the model adds."""
    shortcut: tuple[tuple[Factor, ...], ...]
    """The weight of the shortcut as a sum of products."""
    branch: tuple[tuple[Key, tuple[Factor, ...]], ...]
    """The parts of the branch, each a tensor and its weight; empty where it is what the shortcut leaves of the sum."""
    total: Key
    """The sum."""

    def keys(self, tensors: Container[Key]) -> tuple[Key, ...]:
        """The tensors that it takes.

        Args:
            tensors: those that there are.

        Returns:
            The stream, and the parts of the branch, or the sum where not all of these are there.
        """
        parts = tuple(key for key, _ in self.branch)
        is_whole = parts and all(key in tensors for key in parts)
        return (self.stream, *parts) if is_whole else (self.stream, self.total, *parts)

    def factors(self) -> Iterable[Factor]:
        """The weights that it takes.

        Yields:
            Each factor.
        """
        for factors in (*self.shortcut, *(factors for _, factors in self.branch)):
            yield from factors

    @property
    def plain(self) -> tuple[Key, Key] | None:
        """Stream and branch, where nothing but these two meets; else None."""
        is_plain = self.shortcut == _WHOLE and len(self.branch) == 1 and not self.branch[0][1]
        return (self.stream, self.branch[0][0]) if is_plain else None

    def operands(self, tensors: Mapping[Key, Tensor], weigh: Weigh) -> Operands | None:
        """Get them.

        Args:
            tensors: kept tensors of the graph.
            weigh: reads weights.

        Returns:
            The operands; None if one of them is no longer there, or its weight cannot be read.
        """
        return self._unweighted(tensors) or self._weighted(tensors, weigh)

    @torch.no_grad()
    def _weighted(self, tensors: Mapping[Key, Tensor], weigh: Weigh) -> Operands | None:
        stream, weight = tensors.get(self.stream), _total(self.shortcut, weigh)
        if stream is None or weight is None:
            return None
        shortcut = stream.to(self.dtype)
        if not (isinstance(weight, float) and weight == 1.0):
            shortcut = (shortcut * weight).to(self.dtype)
        branch = self._branch(shortcut, tensors, weigh)
        if branch is None or shortcut.shape != stream.shape or branch.shape != stream.shape:
            return None
        return Operands(stream, shortcut, branch.to(self.dtype))

    def _unweighted(self, tensors: Mapping[Key, Tensor]) -> Operands | None:
        """Most sums: both operands are kept tensors in the type of the sum."""
        if self.shortcut != _WHOLE or len(self.branch) != 1 or self.branch[0][1]:
            return None
        stream, branch = tensors.get(self.stream), tensors.get(self.branch[0][0])
        if stream is None or branch is None or stream.dtype is not self.dtype or branch.dtype is not self.dtype:
            return None
        return Operands(stream, stream, branch) if stream.shape == branch.shape else None

    def _branch(self, shortcut: Tensor, tensors: Mapping[Key, Tensor], weigh: Weigh) -> Tensor | None:
        parts = [_times(tensors.get(key), _product(factors, weigh)) for key, factors in self.branch]
        known = [part for part in parts if part is not None]
        if known and len(known) == len(parts):
            return known[0] if len(known) == 1 else sum(known[1:], known[0])
        total = tensors.get(self.total)
        # Of a narrow type, what is left of the branch in the sum is rounding.
        precise = total is not None and total.element_size() >= 4 and total.shape == shortcut.shape
        return total - shortcut if total is not None and precise else None


class Order:
    """Which tensors are kept of graphs of one shape.

    Args:
        keys: of these, each once.
    """

    def __init__(self, keys: Iterable[Key]) -> None:
        self.places = {key: place for place, key in enumerate(keys)}
        self._plain: tuple[Sequence[Recipe | None], list[tuple[int, int, torch.dtype] | None]] | None = None

    def plain(self, recipes: Sequence[Recipe | None]) -> list[tuple[int, int, torch.dtype] | None]:
        """Where the operands of plain recipes are."""
        if self._plain is None or self._plain[0] is not recipes:
            self._plain = recipes, [None if recipe is None else self._places_of(recipe) for recipe in recipes]
        return self._plain[1]

    def _places_of(self, recipe: Recipe) -> tuple[int, int, torch.dtype] | None:
        if recipe.plain is None:
            return None
        stream, branch = (self.places.get(key, -1) for key in recipe.plain)
        return (stream, branch, recipe.dtype) if min(stream, branch) >= 0 else None


class Kept(Mapping[Key, Tensor]):
    """The tensors of one graph, in the order that others of its shape have too.

    Args:
        order: which they are.
        tensors: they.
    """

    __slots__ = ("_order", "_tensors")

    def __init__(self, order: Order, tensors: list[Tensor]) -> None:
        self._order, self._tensors = order, tensors

    def __getitem__(self, key: Key) -> Tensor:
        return self._tensors[self._order.places[key]]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._order.places)

    def __len__(self) -> int:
        return len(self._tensors)

    def plain(self, recipes: Sequence[Recipe | None]) -> Sequence[Operands | None]:
        """The operands of those recipes that take two tensors of one type and shape and nothing else.

        Args:
            recipes: all of them, the same object for graphs of the same shape.

        Returns:
            The operands of each; None of the others, and without the compiled kernel.
        """
        return kernel_residuals.plain_operands(Operands, self._tensors, self._order.plain(recipes))


def kept(nodes: Sequence[Node], factor: Factor) -> Tensor | float | None:
    """A weight that is a plain number, or that its node has kept.

    Args:
        nodes: of the graph; asked before a backward pass frees what they saved.
        factor: the weight.

    Returns:
        A number, or a tensor that broadcasts against what the factor scales; None if it is neither.
    """
    if not factor.saved:
        return factor.value if factor.node < 0 else None
    found = saved(nodes[factor.node], factor.saved)
    if found is None:
        return None
    if factor.inverse:
        return 1 / found
    return 1 - found if factor.complement else found


def _total(products: Iterable[Sequence[Factor]], weigh: Weigh) -> Tensor | float | None:
    total: Tensor | float = 0.0
    for factors in products:
        weight = _product(factors, weigh)
        if weight is None:
            return None
        total = total + weight
    return total


def _product(factors: Iterable[Factor], weigh: Weigh) -> Tensor | float | None:
    result: Tensor | float = 1.0
    for factor in factors:
        value = weigh(factor)
        if value is None:
            return None
        result = result * value
    return result


def _times(tensor: Tensor | None, weight: Tensor | float | None) -> Tensor | None:
    if tensor is None or weight is None:
        return None
    return tensor if isinstance(weight, float) and weight == 1.0 else tensor * weight
