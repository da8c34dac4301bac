"""The autograd graph of one forward as arrays: nodes in execution order, edges, and what kind of operation each is.

`keelscope.topology.additions` looks for residual additions in it, `keelscope.topology.coefficients` reads the weights
on them, and `keelscope.topology` collects the nodes to start from. The walk is iterative and visits every node once, so
a stack of a thousand sub-layers costs no more per node than a small one. No saved tensor is touched here.
"""

from __future__ import annotations

import functools
import heapq
import math
import re
import sys
from collections.abc import Iterable

import torch
from torch.autograd.graph import Node

from keelscope.topology.edges import Inputs, Key, Readers
from keelscope.unwinding import unwind

__all__ = ["ADDITIONS", "FUSED_ADDITIONS", "Graph", "Key", "dtype_of", "operation", "shape_of"]

ADDITIONS = frozenset({"Add", "Sub", "Rsub", "Lerp", "Addcmul", "CopySlices"})
"""Operations that may join a shortcut and a branch."""

FUSED_ADDITIONS = frozenset({"Addmm", "Baddbmm"})
"""Operations that add a tensor to a product of matrices."""

_SUFFIX = re.compile(r"Backward(\d*|Legacy)$")
_HEAVY = re.compile(
    r"^(\w*[Mm]m|\w*[Mm]v|Addr|Dot|Vdot|Trilinear|Cdist\w*|\w*Convolution\w*|\w*Conv[A-Z\d]\w*|Embedding\w*"
    r"|\w*(Attention|Attn)\w*|\w*Rnn\w*|\w*(Lstm|Gru)\w*|Fft\w*|(Mkldnn)?Linear|\w*MatMul\w*)$"
)
_NORM = re.compile(r"\w*(LayerNorm|RmsNorm|RMSNorm|GroupNorm|BatchNorm|InstanceNorm)\w*")
_SAME_ENTRIES = frozenset(
    {
        "Alias", "AsStrided", "Clone", "Contiguous", "Expand", "FusedDropout", "NativeDropout", "Permute", "Reshape",
        "ReshapeAlias", "Squeeze", "SwapAxes", "SwapDims", "T", "ToCopy", "Transpose", "UnsafeView", "Unsqueeze",
        "View", "ViewAs", "_UnsafeView",
    }
)  # fmt: skip
_OPAQUE = frozenset({"CheckpointFunction", "CompiledFunction"})


def operation(node: Node) -> str:
    """Name of a node without suffix and namespace.

    Args:
        node: a node of the graph.

    Returns:
        ``"Mul"`` for ``MulBackward0``, ``"AccumulateGrad"`` for a leaf.

    Example:
        >>> operation((torch.ones(2, requires_grad=True) * 3).grad_fn)
        'Mul'
    """
    return _without_suffix(node.name())


@functools.cache
def _without_suffix(name: str) -> str:
    """One text for all nodes of a kind."""
    return sys.intern(_SUFFIX.sub("", name.rpartition("::")[2]))


class Graph:
    """Everything that leads to some tensors, earliest operation first.

    Args:
        roots: nodes to start from.
    """

    def __init__(self, roots: Iterable[Node]) -> None:
        found, consumers = _reachable(roots)
        self.nodes = _in_execution_order(found, consumers)
        """Nodes, each after all nodes it takes its inputs from."""
        unwind(self.nodes, (node for node in found if node not in consumers))
        del found, consumers
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.names = [operation(node) for node in self.nodes]
        self._first: list[Key] = [(i, 0) for i in self.index.values()]
        """The first output of each node: nearly all keys, and those who keep one share it."""
        self.inputs = Inputs(self.nodes, self.index, self._first)
        """Per node its input tensors; None where one needs no gradient."""
        self.readers = Readers(self.inputs)
        """Per tensor the nodes that take it, one entry per use."""
        self._heavy = bytearray(len(self.nodes))  # 0 where nobody has asked, else one more than the answer
        self.shapes: dict[Key, tuple[int, ...] | None] = {}
        """Shapes that were asked for: what is read from the graph depends on these and no others."""
        self._alike: dict[tuple[int, ...] | None, tuple[int, ...] | None] = {}  # one object for each shape
        self.dtypes: dict[Key, torch.dtype] = {}
        """Types that were asked for."""
        self.numbers: dict[tuple[int, str], object] = {}
        """Plain numbers kept by nodes that were asked for."""

    def key(self, node: Node | None, output: int) -> Key | None:
        """The tensor that a node puts out, or None if it is not in the graph."""
        index = None if node is None else self.index.get(node)
        if index is None:
            return None
        return (index, output) if output else self._first[index]

    def number(self, index: int) -> int:
        """Autograd's sequence number of a node: it grows from one operation to the next."""
        return _number(self.nodes[index])

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """Shape of a tensor; None where autograd does not keep it."""
        if key not in self.shapes:
            shape = shape_of(self.nodes[key[0]], key[1])
            self.shapes[key] = self._alike.setdefault(shape, shape)
        return self.shapes[key]

    def dtype(self, key: Key) -> torch.dtype:
        """Type of a tensor; float32 where autograd does not keep it."""
        if key not in self.dtypes:
            self.dtypes[key] = dtype_of(self.nodes[key[0]], key[1])
        return self.dtypes[key]

    def plain(self, index: int, attribute: str, otherwise: float = math.nan) -> object:
        """A plain number that a node keeps; it is no saved tensor, so that reading it runs nothing."""
        found: object = getattr(self.nodes[index], attribute, None)
        if found is None:
            return otherwise
        self.numbers[index, attribute] = found
        return found

    def numel(self, key: Key) -> int | None:
        """Number of entries of a tensor; None where autograd does not keep its shape."""
        shape = self.shape(key)
        return None if shape is None else math.prod(shape)

    def leaf(self, key: Key) -> torch.Tensor | None:
        """The leaf tensor behind a key, or None if an operation made it."""
        if self.names[key[0]] != "AccumulateGrad":
            return None
        variable = self.nodes[key[0]].variable  # type: ignore[attr-defined]
        return variable if isinstance(variable, torch.Tensor) else None

    def is_heavy(self, index: int) -> bool:
        """Whether a node mixes features or positions: product of matrices, convolution, embedding, attention."""
        if not self._heavy[index]:
            self._heavy[index] = 1 + self._mixes(index)
        return self._heavy[index] > 1

    def _mixes(self, index: int) -> bool:
        name = self.names[index]
        if name in _OPAQUE or _HEAVY.match(name):
            return True
        if not isinstance(self.nodes[index], torch.autograd.function.BackwardCFunction):
            return False
        return any(key is not None and len(self.shape(key) or ()) > 1 for key in self._parameters(index))

    def _parameters(self, index: int) -> list[Key]:
        """Leaves among the inputs: a user-written operation on a matrix is taken for a product with it."""
        return [key for key in self.inputs[index] if key is not None and self.leaf(key) is not None]

    def is_opaque(self, index: int) -> bool:
        """Whether a node hides a part of the model: a reentrant checkpoint, a compiled region."""
        return self.names[index] in _OPAQUE

    def is_norm(self, index: int) -> bool:
        """Whether a node is a normalisation in one piece."""
        return bool(_NORM.fullmatch(self.names[index]))

    def is_transparent(self, index: int) -> bool:
        """Whether a node keeps the entries: view, transposition, copy, cast, dropout in one piece."""
        return self.names[index] in _SAME_ENTRIES

    def origin(self, key: Key) -> Key:
        """The tensor behind casts, views, copies and dropout in one piece."""
        while self.is_transparent(key[0]):
            source = self.inputs[key[0]][0]
            if source is None:
                break
            key = source
        return key


def shape_of(node: Node, output: int) -> tuple[int, ...] | None:
    """Shape of what a node puts out.

    Args:
        node: the node.
        output: which of its outputs.

    Returns:
        The shape; None where autograd does not keep it.
    """
    metadata = getattr(node, "_input_metadata", ())
    try:
        return tuple(int(size) for size in metadata[output].shape)
    except (IndexError, AttributeError, RuntimeError, TypeError, ValueError):
        return None


def dtype_of(node: Node, output: int) -> torch.dtype:
    """Type of what a node puts out.

    Args:
        node: the node.
        output: which of its outputs.

    Returns:
        The type; float32 where autograd does not keep it.
    """
    metadata = getattr(node, "_input_metadata", ())
    found = getattr(metadata[output], "dtype", None) if output < len(metadata) else None
    return found if isinstance(found, torch.dtype) else torch.float32


def _reachable(roots: Iterable[Node]) -> tuple[dict[Node, None], dict[Node, int]]:
    """Every node behind the roots, and how often each is taken as input."""
    found = dict.fromkeys(roots)
    stack = list(found)
    consumers: dict[Node, int] = {}
    while stack:
        for source, _ in stack.pop().next_functions:
            if source is None:
                continue
            consumers[source] = consumers.get(source, 0) + 1
            if source not in found:
                found[source] = None
                stack.append(source)
    return found, consumers


def _in_execution_order(found: Iterable[Node], consumers: dict[Node, int]) -> list[Node]:
    """By autograd's own numbers, but each node after all it takes its inputs from."""
    waiting = dict(consumers)
    ready = [(-_number(node), position, node) for position, node in enumerate(found) if node not in waiting]
    heapq.heapify(ready)
    order: list[Node] = []
    position = len(ready)
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for source, _ in node.next_functions:
            if source is None:
                continue
            waiting[source] -= 1
            if not waiting[source]:
                position += 1
                heapq.heappush(ready, (-_number(source), position, source))
    return order[::-1]


def _number(node: Node) -> int:
    return int(node._sequence_nr())
