"""The shape of one forward and its graph, by which a later one of the same shape is told from others.

Two graphs are of the same shape if everything is the same that a reading depends on: which modules were called and in
which order, what they took and gave, every node with its kind, its place in the order of execution and its inputs, the
parameters behind it, and those sizes, types and numbers that the reading asked for.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.autograd.graph import Node

from keelscope import kernel, kernel_calls
from keelscope.topology.graph import Graph, Key, dtype_of
from keelscope.topology.hearing import Hearing, Shown
from keelscope.topology.listener import Listener
from keelscope.unwinding import Breaks, hang

__all__ = ["Imprint"]

_LEAF = "AccumulateGrad"
_NOTHING = object()


class Imprint:
    """What has to be the same.

    Args:
        graph: the graph of a forward.
        listener: the calls of that forward.
    """

    def __init__(self, graph: Graph, listener: Listener) -> None:
        origin = _origin(listener)
        self._shift = 0  # from there to the end of the first call that is heard
        self._calls = _calls(listener, origin)
        self._modules = [weakref.ref(call.module) for call in listener.calls]
        self._slots = list(listener.slots)
        self._places = [-1 if key is None else key[0] for key in listener.keys(graph)]
        self._inputs = graph.inputs
        self._kinds = [type(node) for node in graph.nodes]
        told = [node.name() for node in graph.nodes]
        self._names = {i: name for i, name in enumerate(told) if name != self._kinds[i].__name__}
        """Of nodes whose class does not tell their operation."""
        self._numbers = [graph.number(i) - origin for i in range(len(graph.nodes))]
        self._leaves = {i: _variable(graph.nodes[i]) for i, name in enumerate(graph.names) if name == _LEAF}
        self._data = [i for i, parameter in self._leaves.items() if parameter is None]
        self._packed = self._pack()
        self._wanted: list[tuple[int, int, object, torch.dtype | None]] = []
        self._told: list[tuple[object, ...]] = []
        """The same for the compiled kernel, which is not asked for shapes that autograd does not keep."""
        self._heard = b""
        """Where these are among the noted tensors, -1 of those that are not."""
        self._unkept: list[int] = []
        self._kept: list[tuple[int, str, object]] = []
        self._sizes = (0, 0, 0)
        self._asked = graph.shapes, graph.dtypes, graph.numbers
        taken = {key[0] for keys in graph.inputs for key in keys if key is not None}
        self._tops = [i for i in range(len(graph.nodes)) if i not in taken]
        chain = [i for i in range(len(graph.nodes)) if i in taken and graph.inputs[i]]
        self._chain = sorted(random.Random(0).sample(chain, -(-len(chain) // Breaks.distance)))
        """Some nodes on every long way: where they are held, freeing what is above them ends."""

    def nodes_of(self, listener: Listener) -> list[Node] | None:
        """The nodes of another graph of this shape.

        Args:
            listener: the calls of its forward.

        Returns:
            Its nodes in the same order; None if it has another shape.
        """
        nodes = self._of_same_structure(listener)
        if nodes is None or not self._answers(nodes, listener):
            return None
        hang([nodes[i] for i in self._chain], [nodes[i] for i in self._tops])
        return nodes

    def _of_same_structure(self, listener: Listener) -> list[Node] | None:
        """The nodes of a graph that may differ in sizes, types and numbers."""
        origin = _origin(listener) - self._shift
        if listener.slots != self._slots or not self._is_called(listener, origin):
            return None
        walk = self._walked_natively if kernel.is_compiled() else self._walked
        nodes = walk(listener.nodes, origin)
        return None if nodes is None or len({nodes[i] for i in self._data}) < len(self._data) else nodes

    @property
    def tops(self) -> Sequence[int]:
        """Places of the nodes that no other takes its inputs from: the graph is walked from there."""
        return self._tops

    @property
    def keys(self) -> list[Key]:
        """The noted tensors; places of those that are not in the graph are negative."""
        return list(zip(self._places, self._slots, strict=True))

    def shown(self) -> Iterator[tuple[str, list[Shown]]]:
        """What each call shows: tensors, and the places of their nodes.

        Yields:
            Path of the module, and what its call shows.
        """
        keys = self.keys
        for path, *_, first, _, last in self._calls:
            yield path, [thing for key in keys[first:last] for thing in (key, key[0])]

    def excerpt(self, hearing: Hearing) -> Imprint:
        """What has to be the same where some modules only are listened to.

        Args:
            hearing: these modules.

        Returns:
            An imprint of the same graph.
        """
        other = copy.copy(self)
        chosen = [i for i, call in enumerate(self._calls) if call[0] in hearing]
        other._modules = [self._modules[i] for i in chosen]
        other._calls, other._slots, other._places = [], [], []
        for path, start, end, first, middle, last in (self._calls[i] for i in chosen):
            moved = len(other._slots) - first
            begun = start if path in hearing.begun else None
            other._calls.append((path, begun, end, first + moved, middle + moved, last + moved))
            other._slots += self._slots[first:last]
            other._places += self._places[first:last]
        other._shift = other._calls[0][2] if chosen else 0
        other._sizes = (-1, -1, -1)  # what is heard is elsewhere
        other._packed = _packed_places(other._places), *self._packed[1:]
        return other

    def tell(self, listener: Listener, excerpt: Imprint) -> bool:
        """Tell a listener that heard some modules of the calls of all, if its graph is of the same structure.

        Args:
            listener: the listener.
            excerpt: the part of this imprint that it heard.

        Returns:
            Whether it is; sizes, types and numbers may be others.
        """
        nodes = excerpt._of_same_structure(listener)
        modules = [module for known in self._modules if (module := known()) is not None]
        if nodes is None or len(modules) < len(self._calls) or min(self._places, default=0) < 0:
            return False
        origin = _origin(listener) - excerpt._shift
        rows = [
            (path, module, (-1 if start is None else origin + start, origin + end), first, middle, last)
            for (path, start, end, first, middle, last), module in zip(self._calls, modules, strict=True)
        ]
        listener.complete(rows, [nodes[i] for i in self._places], self._slots)
        return True

    def _is_called(self, listener: Listener, origin: int) -> bool:
        """Whether the same modules were called in the same way."""
        found = kernel_calls.same_calls(listener.rows, self._calls, self._modules, origin)
        if found is not None:
            return found
        if _calls(listener, origin) != self._calls:
            return False
        return all(known() is call[1] for known, call in zip(self._modules, listener.rows, strict=True))

    def _pack(self) -> tuple[object, ...]:
        """The same for the compiled kernel."""
        edges: list[int] = []
        for keys in reversed(self._inputs):
            edges += (len(keys), *(number for key in keys for number in key or (-1, -1)))
        leaves = {i: False if parameter is None else parameter for i, parameter in self._leaves.items()}
        marks: dict[int, object] = {**self._names, **leaves}
        return (
            _packed_places(self._places),
            np.array(edges, np.int32).tobytes(),
            np.array([0 if i in leaves else number for i, number in enumerate(self._numbers)], np.int64).tobytes(),
            tuple(self._kinds),
            tuple(marks.get(i) for i in range(len(self._kinds))),
        )

    def _walked_natively(self, starts: list[Node], origin: int) -> list[Node] | None:
        return kernel_calls.same_nodes(starts, self._packed, origin)

    def _walked(self, starts: Sequence[Node], origin: int) -> list[Node] | None:
        """Every node, from the output side."""
        found: list[Node | None] = [None] * len(self._kinds)
        for start, place in zip(starts, self._places, strict=True):
            if place >= 0 and not _put(found, place, start):
                return None
        nodes: list[Node] = []
        for i in range(len(found) - 1, -1, -1):
            node = found[i]
            if node is None or not self._is_like(i, node, origin) or not self._follow(found, self._inputs[i], node):
                return None
            nodes.append(node)
        return nodes[::-1]

    @staticmethod
    def _follow(found: list[Node | None], expected: Sequence[Key | None], node: Node) -> bool:
        """Note the nodes that a node takes its inputs from; False if they are not as expected."""
        edges = node.next_functions
        if len(expected) != len(edges):
            return False
        for key, (source, output) in zip(expected, edges, strict=True):
            if key is None or source is None:
                if key is not None or source is not None:
                    return False
            elif output != key[1] or not _put(found, key[0], source):
                return False
        return True

    def _is_like(self, index: int, node: Node, origin: int) -> bool:
        if type(node) is not self._kinds[index] or (index in self._names and node.name() != self._names[index]):
            return False
        if index in self._leaves:
            return _is_same_leaf(self._leaves[index], node)
        return node._sequence_nr() - origin == self._numbers[index]

    def _answers(self, nodes: list[Node], listener: Listener) -> bool:
        """Whether everything that the reading asked for is the same."""
        shapes, dtypes, numbers = self._asked
        sizes = len(shapes), len(dtypes), len(numbers)
        if sizes != self._sizes:
            self._sizes = sizes
            keys = [*shapes, *(key for key in dtypes if key not in shapes)]
            self._wanted = [(*key, shapes.get(key, _NOTHING), dtypes.get(key)) for key in keys]
            told = [(*key, None if shape is _NOTHING else shape, dtype) for *key, shape, dtype in self._wanted]
            self._told, self._unkept = told, [i for i, one in enumerate(self._wanted) if one[2] is None]
            self._kept = [(*place, number) for place, number in numbers.items()]
            heard = {key: position for position, key in enumerate(self.keys)}
            self._heard = _packed_places([heard.get((place, output), -1) for place, output, *_ in self._wanted])
        if not kernel_calls.same_numbers(nodes, self._kept):
            return False
        unsure = {*kernel_calls.other_tensors(nodes, self._told, listener.held, self._heard), *self._unkept}
        return all(_is_tensor(nodes[self._wanted[i][0]], *self._wanted[i][1:]) for i in unsure)


def _is_tensor(node: Node, output: int, shape: object, dtype: torch.dtype | None) -> bool:
    """Whether what a node puts out has a shape and type, as far as one was asked for."""
    metadata = getattr(node, "_input_metadata", ())
    try:
        found = metadata[output]
        is_shape = shape is _NOTHING or tuple(found.shape) == shape
    except (IndexError, AttributeError, RuntimeError, TypeError, ValueError):
        return shape is None and dtype in {None, dtype_of(node, output)}
    return is_shape and (dtype is None or found.dtype == dtype)


def _packed_places(places: list[int]) -> bytes:
    return np.array(places, np.int32).tobytes()


def _origin(listener: Listener) -> int:
    """What sequence numbers are counted from."""
    return listener.rows[0][2][1] if listener.rows else 0


def _calls(listener: Listener, origin: int) -> list[tuple[str, int | None, int, int, int, int]]:
    """Path, when it began (if that was heard) and ended, and where its tensors are, for each call."""
    return [
        (path, None if start < 0 else start - origin, end - origin, first, middle, last)
        for path, _, (start, end), first, middle, last in listener.rows
    ]


def _variable(node: Node) -> weakref.ref[torch.Tensor] | None:
    """The parameter behind a leaf; None for data, which is another tensor every time."""
    variable: torch.Tensor = node.variable  # type: ignore[attr-defined]
    return weakref.ref(variable) if isinstance(variable, torch.nn.Parameter) else None


def _is_same_leaf(known: weakref.ref[torch.Tensor] | None, node: Node) -> bool:
    variable: torch.Tensor = node.variable  # type: ignore[attr-defined]
    return not isinstance(variable, torch.nn.Parameter) if known is None else known() is variable


def _put(found: list[Node | None], place: int, node: Node) -> bool:
    """Note that a node stands at a place; False if another one does."""
    if found[place] is None:
        found[place] = node
    return found[place] is node
