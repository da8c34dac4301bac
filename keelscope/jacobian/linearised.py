"""The Jacobian of one module call, on the graph that its forward left behind.

A product with the transposed Jacobian is a walk over the nodes between the module's output and its input. The nodes
are called one by one and not by autograd's engine, which would run every hook on the way once more: those of the user,
of data-parallel wrappers and our own. Calling a node runs none, reaches no parameter, and leaves what it saved in place
for the backward pass that is under way. Where calling one twice could be seen from outside (custom functions,
checkpoints, compiled regions, FSDP), nothing is called and `NotLinearisableError` says why.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from keelscope.errors import ModelError
from keelscope.jacobian.operators import Operator
from keelscope.unwinding import unwind

__all__ = ["Entry", "NotLinearisableError", "linearised"]

_Targets = tuple[tuple[Node | None, int], ...]
_NO_SECOND = ("not implemented", "derivative for")


class NotLinearisableError(ModelError):
    """The Jacobian of a module cannot be multiplied with, without side effects; the message completes "it ..."."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor enters a module."""

    node: Node
    output: int
    start: int
    """Number of the first node made after it."""

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        """The place of a tensor that requires a gradient, before the module runs."""
        edge = get_gradient_edge(tensor)
        return cls(edge.node, edge.output_nr, int(torch._C._autograd._get_sequence_nr()))


class _Edge(NamedTuple):
    """Where one result of a node goes: to an input of a later step of the walk, or to the entry."""

    slot: int
    step: int
    """Index of the step; -1 for the entry."""
    target: int
    shape: torch.Size
    dtype: torch.dtype


class _Step(NamedTuple):
    node: Node
    inputs: int
    edges: tuple[_Edge, ...]

    def called(self, gradients: list[Tensor | None]) -> tuple[Tensor | None, ...]:
        """What the node passes on."""
        gradient = gradients[0]
        product = _PRODUCTS.get(self.node.name())
        if product is not None and gradient is not None and [edge.slot for edge in self.edges] == [product]:
            # the node itself would compute the gradient of the weights too, which costs as much again
            scaled = gradient @ self.node._saved_mat2.mT  # type: ignore[attr-defined]
            return (None,) * product + (scaled * getattr(self.node, "_saved_alpha", 1),)
        results = self.node(*gradients)  # type: ignore[operator]
        return results if isinstance(results, tuple) else (results,)


_PRODUCTS = {"MmBackward0": 0, "AddmmBackward0": 1}
"""Products with a matrix -> which result is the gradient of the other factor."""


def linearised(root: Node, output: int, entry: Entry) -> Operator:
    """The Jacobian of a tensor with respect to an earlier one, as an operator.

    Args:
        root: the node that made the tensor.
        output: which of the node's outputs it is.
        entry: the earlier one.

    Returns:
        The operator, with a `jvp` that differentiates the walk once more (products with the transpose of the
        transpose). It can be used until the backward pass has been here.

    Raises:
        NotLinearisableError: if the nodes in between cannot be called without side effects, or do not connect them.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> entry = Entry.of(x)
        >>> operator = linearised((x * x).sum(0, keepdim=True).grad_fn, 0, entry)
        >>> operator.vjp(torch.ones(1)).tolist(), operator.jvp(torch.ones(2)).tolist()
        ([2.0, 4.0], [6.0])
    """
    walk = _Walk(root, output, entry)
    shape, dtype, device = _described(root, output)
    return Operator(walk.vjp, _described(entry.node, entry.output)[0], shape, dtype, device, _Tangent(walk).jvp)


class _Walk:
    """Products with the transposed Jacobian."""

    def __init__(self, root: Node, output: int, entry: Entry) -> None:
        self._output, self._is_entry = output, root is entry.node and output == entry.output
        self.described = _described(root, output)
        self._steps = [] if self._is_entry else _steps(root, entry)

    def vjp(self, u: Tensor) -> Tensor:
        """``J' u``; differentiable in u where gradients are enabled and u requires one."""
        with torch.set_grad_enabled(u.requires_grad):
            return u if self._is_entry else self._down(u)

    def _down(self, u: Tensor) -> Tensor:
        waiting: dict[int, list[Tensor | None]] = {0: _with([None] * self._steps[0].inputs, self._output, u)}
        arrived: list[Tensor | None] = [None]
        for i, step in enumerate(self._steps):
            gradients = waiting.pop(i, None)
            if gradients is None:
                continue
            results = step.called(gradients)
            for edge in step.edges:
                result = results[edge.slot]
                if result is None:  # a node leaves out what the backward pass around us does not ask for
                    raise NotLinearisableError("passes a gradient on that this backward pass does not compute")
                size = 1 if edge.step < 0 else self._steps[edge.step].inputs
                there = arrived if edge.step < 0 else waiting.setdefault(edge.step, [None] * size)
                _with(there, edge.target, _fitted(result, edge))
        assert arrived[0] is not None
        return arrived[0]


class _Tangent:
    """Products with the Jacobian: ``J' u`` is linear in u, and its own transposed product is ``J v``."""

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk
        self._transposed: _Walk | None = None

    def jvp(self, v: Tensor) -> Tensor:
        """``J v``."""
        try:
            if self._transposed is None:
                self._transposed = self._made()
            return self._transposed.vjp(v)
        except RuntimeError as error:
            if any(mark in str(error) for mark in _NO_SECOND):
                raise NotLinearisableError(
                    f"uses an operation without a second derivative ({str(error).splitlines()[0][:150]}); for fused "
                    "attention, run the model under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
                ) from error
            raise

    def _made(self) -> _Walk:
        shape, dtype, device = self._walk.described
        u = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
        entry = Entry.of(u)
        image = self._walk.vjp(u)
        if image is u:
            return self._walk
        assert image.grad_fn is not None
        return _Walk(image.grad_fn, image.output_nr, entry)


def _with(gradients: list[Tensor | None], place: int, gradient: Tensor) -> list[Tensor | None]:
    known = gradients[place]
    gradients[place] = gradient if known is None else known + gradient
    return gradients


def _fitted(gradient: Tensor, edge: _Edge) -> Tensor:
    """A gradient as the engine hands it on: summed over what was broadcast, in the type of its tensor."""
    if gradient.shape != edge.shape:
        gradient = gradient.sum_to_size(edge.shape)
    return gradient if gradient.dtype == edge.dtype else gradient.to(edge.dtype)


def _described(node: Node, output: int) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Shape, type and device of a tensor of the graph."""
    return _checked(node._input_metadata[output])


def _checked(about: Any) -> tuple[torch.Size, torch.dtype, torch.device]:
    if about.is_nested_tensor or about.dtype.is_complex:
        raise NotLinearisableError("has a nested or complex tensor between its input and its output")
    return torch.Size(about.shape), about.dtype, about.device


def _steps(root: Node, entry: Entry) -> list[_Step]:
    """The nodes that lie between two places, each before all nodes that it passes a gradient to."""
    targets = _made_after(root, entry)
    order = _ordered(root, targets) if targets else []
    unwind(order[::-1], order[:1])
    leads: set[Node] = set()
    for node in reversed(order):
        if any(_is_at(entry, *target) or target[0] in leads for target in targets[node]):
            leads.add(node)
    order = [node for node in order if node in leads]
    if not order:
        raise NotLinearisableError("has an output that does not depend on its first input through the graph")
    about = {node: node._input_metadata for node in order}
    for node in order:
        _check_callable(node)
    place = {node: i for i, node in enumerate(order)}
    end = _described(entry.node, entry.output)[:2]
    return [_Step(node, len(about[node]), tuple(_edges(targets[node], place, about, entry, end))) for node in order]


def _edges(
    targets: _Targets, place: dict[Node, int], about: dict[Node, Any], entry: Entry, end: tuple[torch.Size, torch.dtype]
) -> Iterator[_Edge]:
    for slot, (target, nr) in enumerate(targets):
        if _is_at(entry, target, nr):
            yield _Edge(slot, -1, 0, *end)
        elif target is not None and target in place:
            yield _Edge(slot, place[target], nr, *_checked(about[target][nr])[:2])


def _is_at(entry: Entry, node: Node | None, output: int) -> bool:
    return node is entry.node and output == entry.output


def _made_after(root: Node, entry: Entry) -> dict[Node, _Targets]:
    """Nodes that lead to the root and were made after the entry, with where each passes its results."""
    found: dict[Node, _Targets] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if node in found or node is entry.node or int(node._sequence_nr()) < entry.start:
            continue
        found[node] = node.next_functions
        stack.extend(target for target, _ in found[node] if target is not None)
    return found


def _ordered(root: Node, targets: dict[Node, _Targets]) -> list[Node]:
    """Nodes in topological order, the root first."""
    consumers = Counter(target for several in targets.values() for target, _ in several if target in targets)
    order, ready = [], [root]
    while ready:
        node = ready.pop()
        order.append(node)
        for target, _ in targets.get(node, ()):
            if target is not None and target in targets:
                consumers[target] -= 1
                if not consumers[target]:
                    ready.append(target)
    return order


def _check_callable(node: Node) -> None:
    """Raise where a node may not be called beside the backward pass."""
    if isinstance(node, torch._C._FunctionBase) or "CppNode" in node.name():
        kind = node.name().rpartition("::")[2].removesuffix("Backward")
        raise NotLinearisableError(f"contains the custom autograd function {kind}, which would run more than once")
    for attribute in _saved_names(type(node)):
        raw = getattr(node, attribute)
        if any(_has_hook(saved) for saved in (raw if isinstance(raw, tuple) else (raw,))):
            raise NotLinearisableError("lies under activation checkpointing or other saved-tensor hooks")
        try:
            kept = getattr(node, attribute.replace("_raw", "", 1))
        except RuntimeError as error:
            raise NotLinearisableError("has no saved tensors any more, or changed one in place") from error
        if any(_is_freed(tensor) for tensor in (kept if isinstance(kept, tuple) else (kept,))):
            raise NotLinearisableError("has weights that are sharded between forward and backward (FSDP)")


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved"))


def _has_hook(saved: object) -> bool:
    """Whether reading a saved tensor runs code."""
    if saved is not None and not hasattr(saved, "unpack_hook"):
        raise NotLinearisableError("saved tensors of which this version of torch does not tell whether they have hooks")
    return getattr(saved, "unpack_hook", None) is not None


def _is_freed(tensor: object) -> bool:
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    if type(tensor) not in {Tensor, torch.nn.Parameter, torch.nn.Buffer}:
        return False
    return tensor.untyped_storage().nbytes() == 0
