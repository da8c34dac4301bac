"""Hooks on the nodes around every stream tensor, which show its gradient by the way it came.

Each contribution to the gradient of a stream tensor x is seen where the node that reads x hands it over: those of
branch nodes add up to the branch part, all others to the shortcut part. When the whole gradient of x has arrived, what
shortcuts alone carried there is known as well, and is carried on to the next stream tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from keelscope import kernel, kernel_residuals
from keelscope.containment import contained, warn_once
from keelscope.paths.chain import carry, obstacle
from keelscope.paths.plan import plan_of
from keelscope.paths.routes import Before, Plan, Reader, Routes
from keelscope.topology.graph import Key
from keelscope.topology.live import LiveGraph, LiveSublayer

__all__ = ["PathFlow", "PathGradients"]

Gradients = Sequence[Tensor | None]
_COLUMNS = 13
"""Of `keelscope.kernel_residuals.residual_gradients`."""


class PathGradients(NamedTuple):
    """The gradients around one sub-layer in one backward pass; None where one did not arrive or cannot be known."""

    leaving: Tensor | None
    """g', at the stream tensor after the sub-layer."""
    total: Tensor | None
    """J_n^T g', at the sum."""
    shortcut: Tensor | None
    """What reaches the entering stream tensor by any way but a branch: a J_n^T g'."""
    branch: Tensor | None
    """What reaches it through branches."""
    entering: Tensor | None
    """g, at the entering stream tensor: the sum of both."""
    shortcut_only: Tensor | None
    """What reaches it if no branch of the model passes a gradient."""


@dataclass(slots=True)
class _Stream:
    """One stream tensor while its gradient arrives."""

    shortcut: Tensor | None = None
    branch: Tensor | None = None
    carried: Tensor | None = None
    is_known: bool = True
    """Whether `carried` is complete."""
    is_done: bool = False


class PathFlow:
    """Watches the first backward pass through a graph.

    Args:
        live: the graph with its sub-layers.
        report: called with the index of a sub-layer and its gradients, when all of them have arrived.
        routes: the plan, made before from a graph of the same shape; None makes one.
        sums: whether the compiled kernel may take the sums of `keelscope.kernel_residuals.residual_gradients` in place
            of a report; `taken` has them.
    """

    def __init__(
        self,
        live: LiveGraph,
        report: Callable[[int, PathGradients], None],
        routes: Routes | None = None,
        *,
        sums: bool = False,
    ) -> None:
        if routes is None:
            assert live.graph is not None
            routes = Routes(live.graph, live.places)
        self._nodes: Sequence[Node] = live.nodes
        self._routes = routes
        self._plan: Plan | None = None
        self._native = None
        if kernel.is_compiled():
            self._plan = routes.plan = routes.plan or plan_of(routes)
            sizes = len(routes.streams), len(routes.places.sublayers)
            self._native = kernel_residuals.flow(weakref.ref(self), self._plan.numbers, *sizes, sums=sums)
        self._report = report
        self._handles: list[RemovableHandle] = []
        self._streams = {key: _Stream() for key in routes.streams} if self._native is None else {}
        self._leaving: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self.obstacles: dict[str, None] = {}
        """Why what shortcuts carry is not known everywhere."""

    def attach(self) -> None:
        """Put the hooks on, before the backward pass reaches the sub-layers."""
        nodes = self._nodes
        if self._native is not None and self._plan is not None:
            self._native.attach(nodes, self._plan.hooks)
            return
        for index, before in self._routes.before.items():
            self._handles.append(nodes[index].register_prehook(_BeforeNode(self, before)))
        for index, readers in self._routes.after.items():
            self._handles.append(nodes[index].register_hook(_AfterNode(self, readers)))

    def detach(self) -> None:
        """Take the hooks off and let go of what has arrived, but for sums."""
        if self._native is not None:
            self._native.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._streams.clear()
        self._leaving.clear()
        self._totals.clear()
        self._nodes = ()

    @property
    def sublayers(self) -> Sequence[LiveSublayer]:
        """The sub-layers of the graph."""
        return self._routes.places.sublayers

    def taken(self) -> tuple[NDArray[np.bool_], NDArray[np.float64]] | None:
        """What the compiled kernel has summed.

        Returns:
            Whether it has, ``[sub-layer]``, and packed columns, ``[sub-layer, column]``, both by position among the
            sub-layers of the graph; None without the kernel.
        """
        if self._native is None:
            return None
        seen, rows = self._native.take()
        return np.frombuffer(seen, np.bool_), np.frombuffer(rows).reshape(len(seen), _COLUMNS)

    @contained
    def arriving(self, before: Before, gradients: Gradients) -> None:
        """The gradients of a node's outputs have arrived.

        Args:
            before: what to do with them.
            gradients: one per output.
        """
        parts = [None if gradient is None else gradient.detach() for gradient in gradients]
        for key in before.arrivals:
            self._arrived(key, parts[key[1]])
        for key in before.starts:
            self._carry_on(key)
        first = parts[0] if parts else None
        if first is None:
            return
        for position in before.totals:
            self._totals.setdefault(position, first)
        for reader in before.passes:
            self.hand(reader, first)

    def hand(self, reader: Reader, part: Tensor) -> None:
        """A node hands over its part of a stream tensor's gradient.

        Args:
            reader: the node.
            part: the part, detached, of one of the inputs that the stream tensor is.
        """
        stream = self._streams.get(reader.stream)
        if stream is None or stream.is_done:
            return
        if reader.is_branch:
            stream.branch = _plus(stream.branch, part)
            return
        stream.shortcut = _plus(stream.shortcut, part)
        if not reader.is_carried:  # from outside the stack: the real gradient is what starts here
            stream.carried = _plus(stream.carried, part)

    def _arrived(self, key: Key, gradient: Tensor | None) -> None:
        stream = self._streams.get(key)
        if stream is None or stream.is_done or gradient is None:
            return
        stream.is_done = True
        place = self._routes.streams[key]
        if place.is_end:
            stream.carried = gradient
        for position in place.enters:
            self._emit(position, stream, gradient)
        for position in place.leaves:
            self._leaving[position] = gradient
        stream.shortcut = stream.branch = None
        if place.hop is None or place.starts_here:
            self._carry_on(key)

    def _emit(self, position: int, stream: _Stream, gradient: Tensor) -> None:
        """Report a sub-layer; a part that nothing arrived for is zero."""
        carried = _or_zero(stream.carried, gradient) if stream.is_known else None
        gradients = PathGradients(
            self._leaving.pop(position, None),
            self._totals.pop(position, None),
            _or_zero(stream.shortcut, gradient),
            _or_zero(stream.branch, gradient),
            gradient,
            carried,
        )
        self._report(self._routes.places.sublayers[position].index, gradients)

    @contained
    def _emit_found(self, position: int, found: tuple[Tensor | None, ...], is_known: bool) -> None:
        """Report a sub-layer of which the kernel has not taken the sums."""
        leaving, total, shortcut, branch, gradient, carried = found
        assert gradient is not None
        gradients = PathGradients(
            *(leaving, total, _or_zero(shortcut, gradient), _or_zero(branch, gradient), gradient),
            _or_zero(carried, gradient) if is_known else None,
        )
        self._report(self._routes.places.sublayers[position].index, gradients)

    @contained
    def _carry_along(self, which: int, carried: Tensor | None) -> None:
        """Hand what shortcuts carried on, along a hop that the kernel does not know."""
        assert self._native is not None
        assert self._plan is not None
        hop = self._routes.streams[self._plan.keys[which]].hop
        assert hop is not None
        reason = obstacle(self._nodes, hop)
        index = {key: number for number, key in enumerate(self._plan.keys) if key in hop.targets}
        if reason:
            self.obstacles[reason] = None
            for target in hop.targets:
                self._native.carry(index[target], None)
        elif carried is not None:
            for target, part in carry(self._nodes, hop, carried).items():
                self._native.carry(index[target], part)

    def _failed(self, error: Exception) -> None:
        warn_once(self, error)

    def _carry_on(self, key: Key) -> None:
        """Hand what shortcuts carried on to the stream tensors before."""
        hop, stream = self._routes.streams[key].hop, self._streams.get(key)
        if hop is None or stream is None:
            return
        carried, stream.carried = stream.carried, None
        reason = obstacle(self._nodes, hop) if stream.is_known else ""
        if reason:
            self.obstacles[reason] = None
        if reason or not stream.is_known:
            for target in hop.targets:
                self._streams[target].is_known = False
        elif carried is not None:
            for target, part in carry(self._nodes, hop, carried).items():
                self._streams[target].carried = _plus(self._streams[target].carried, part)


@dataclass(frozen=True, slots=True, eq=False)
class _BeforeNode:
    """Hook before one node."""

    flow: PathFlow
    before: Before

    def __call__(self, gradients: Gradients) -> None:
        self.flow.arriving(self.before, gradients)


@dataclass(frozen=True, slots=True, eq=False)
class _AfterNode:
    """Hook after one node."""

    flow: PathFlow
    readers: Sequence[Reader]

    def __call__(self, inputs: Gradients, _: Gradients) -> None:
        for reader in self.readers:
            for slot in reader.slots:
                part = inputs[slot]
                if part is not None:
                    self.flow.hand(reader, part.detach())


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def _or_zero(part: Tensor | None, like: Tensor) -> Tensor:
    return like.new_zeros(()).expand_as(like) if part is None else part
