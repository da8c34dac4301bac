"""Hooks on the nodes around every stream tensor, which show its gradient by the way it came.

Each contribution to the gradient of a stream tensor x is seen where the node that reads x hands it over: those of
branch nodes add up to the branch part, all others to the shortcut part. When the whole gradient of x has arrived, what
shortcuts alone carried there is known as well, and is carried on to the next stream tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from keelscope.containment import contained
from keelscope.paths.chain import carry, obstacle
from keelscope.paths.regions import Regions
from keelscope.topology.graph import Key
from keelscope.topology.live import LiveGraph

__all__ = ["PathFlow", "PathGradients"]

Gradients = Sequence[Tensor | None]


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
    enters: list[int] = field(default_factory=list)
    """Positions of the sub-layers that read it as their stream."""
    leaves: list[int] = field(default_factory=list)
    """Positions of the sub-layers that put it out."""


class PathFlow:
    """Watches the first backward pass through a graph.

    Args:
        live: the graph with its sub-layers.
        report: called with the index of a sub-layer and its gradients, when all of them have arrived.
    """

    def __init__(self, live: LiveGraph, report: Callable[[int, PathGradients], None]) -> None:
        self._graph = live.graph
        self._sublayers = live.sublayers
        self._regions = Regions(live)
        self._report = report
        self._handles = ExitStack()
        self._streams = {key: _Stream() for key in self._regions.streams}
        self._leaving: dict[int, Tensor] = {}
        self._totals: dict[int, Tensor] = {}
        self.obstacles: dict[str, None] = {}
        """Why what shortcuts carry is not known everywhere."""
        for position, sublayer in enumerate(live.sublayers):
            self._streams[sublayer.entering].enters.append(position)
            self._streams[sublayer.leaving].leaves.append(position)

    def attach(self) -> None:
        """Put the hooks on, before the backward pass reaches the sub-layers."""
        for key in self._streams:
            self._before(key[0], self._on_stream(key))
            for reader in dict.fromkeys(self._graph.readers.get(key, ())):
                self._after(reader, self._on_reader(key, reader))
        for position, sublayer in enumerate(self._sublayers):
            if sublayer.addition is not None:
                self._before(sublayer.addition.root, self._on_total(position))

    def detach(self) -> None:
        """Take the hooks off and let go of what has arrived."""
        self._handles.close()
        self._streams.clear()
        self._leaving.clear()
        self._totals.clear()

    def _before(self, index: int, hook: Callable[[Gradients], None]) -> None:
        self._handles.callback(self._graph.nodes[index].register_prehook(hook).remove)

    def _after(self, index: int, hook: Callable[[Gradients, Gradients], None]) -> None:
        self._handles.callback(self._graph.nodes[index].register_hook(hook).remove)

    def _on_stream(self, key: Key) -> Callable[[Gradients], None]:
        def arrived(outputs: Gradients) -> None:
            self._arrived(key, outputs[key[1]])

        return arrived

    def _on_total(self, position: int) -> Callable[[Gradients], None]:
        def arrived(outputs: Gradients) -> None:
            if outputs[0] is not None:
                self._totals.setdefault(position, outputs[0].detach())

        return arrived

    def _on_reader(self, key: Key, reader: int) -> Callable[[Gradients, Gradients], None]:
        slots = [slot for slot, source in enumerate(self._graph.inputs[reader]) if source == key]
        is_branch, is_carried = self._regions.is_branch(reader), self._regions.is_carried(reader)

        def handed(inputs: Gradients, _: Gradients) -> None:
            stream = self._streams.get(key)
            if stream is None or stream.is_done:
                return
            for part in (inputs[slot] for slot in slots):
                if part is None:
                    continue
                if is_branch:
                    stream.branch = _plus(stream.branch, part)
                    continue
                stream.shortcut = _plus(stream.shortcut, part)
                if not is_carried:  # from outside the stack: the real gradient is what starts here
                    stream.carried = _plus(stream.carried, part)

        return handed

    @contained
    def _arrived(self, key: Key, gradient: Tensor | None) -> None:
        stream = self._streams.get(key)
        if stream is None or stream.is_done or gradient is None:
            return
        stream.is_done = True
        gradient = gradient.detach()
        if key not in self._regions.entered:  # the end of a stream: all that arrives comes from outside
            stream.carried = gradient
        for position in stream.enters:
            self._emit(position, stream, gradient)
        self._leaving.update(dict.fromkeys(stream.leaves, gradient))
        self._carry_on(key, stream)
        stream.shortcut = stream.branch = stream.carried = None

    def _emit(self, position: int, stream: _Stream, gradient: Tensor) -> None:
        """Report a sub-layer; a part that nothing arrived for is zero."""
        zero = gradient.new_zeros(())
        gradients = PathGradients(
            self._leaving.pop(position, None),
            self._totals.pop(position, None),
            zero.expand_as(gradient) if stream.shortcut is None else stream.shortcut,
            zero.expand_as(gradient) if stream.branch is None else stream.branch,
            gradient,
            (zero.expand_as(gradient) if stream.carried is None else stream.carried) if stream.is_known else None,
        )
        self._report(self._sublayers[position].index, gradients)

    def _carry_on(self, key: Key, stream: _Stream) -> None:
        """Hand what shortcuts carried on to the stream tensors before."""
        hop = self._regions.hops.get(key)
        if hop is None or not hop.targets:
            return
        reason = obstacle(self._graph, hop) if stream.is_known else ""
        if reason:
            self.obstacles[reason] = None
        if reason or not stream.is_known:
            for target in hop.targets:
                self._streams[target].is_known = False
        elif stream.carried is not None:
            for target, part in carry(self._graph, hop, stream.carried, self._regions.cuts).items():
                self._streams[target].carried = _plus(self._streams[target].carried, part)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part.detach() if total is None else total + part.detach()
