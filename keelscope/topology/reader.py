"""`GraphReader`, which listens to a forward and reads its graph once, and `find`, which does all of it for one batch.

A recording drives the reader from its hooks. What a forward does not show (regions under reentrant checkpointing, sums
made in place on a view) is completed by `settle` after the backward pass that runs anyway.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from keelscope.onepass import backward, loss_of
from keelscope.sites import clean_path
from keelscope.stacks import find_stacks, unwrapped
from keelscope.topology.extras import Extras
from keelscope.topology.followers import following
from keelscope.topology.graph import Graph, Key
from keelscope.topology.held import Held
from keelscope.topology.listener import Listener
from keelscope.topology.live import LiveGate, LiveGraph, LiveOutput
from keelscope.topology.memory import Memory
from keelscope.topology.reading import Reading
from keelscope.topology.records import Topology
from keelscope.untouched import untouched

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.autograd.graph import Node

__all__ = ["GraphReader", "find"]


_NOTHING_MORE = Extras()


class GraphReader:
    """Collects what modules took and gave during one forward, then reads the topology from the graph behind it.

    It keeps nodes of the graph, no tensors, and lets go of them when it has read.

    Args:
        model: the model, as the user has it.
        keep: also keep the tensors that modules take and give until the graph is read, for `live`.
        memory: earlier readings of the model, for a graph of the same shape.
    """

    def __init__(self, model: nn.Module, *, keep: bool = False, memory: Memory | None = None) -> None:
        self._memory = memory
        self._model = unwrapped(model)
        self._forward: Listener | None = Listener(keep=keep)
        self.live: LiveGraph | None = None
        """The graph that was read, with its sub-layers; set by `read` if tensors are kept."""
        self.gates: list[LiveGate | LiveOutput] = []
        """Weights that depend on data, and outputs of modules that are called gates; set by `read`, to be let go of
        before the backward pass is over."""
        self._regions: dict[Node, Listener] = {}
        self._shown: dict[Node, Topology] = {}
        self._reading: Reading | None = None
        self._extras = _NOTHING_MORE
        self._following: frozenset[str] = frozenset()

    @functools.cached_property
    def _held(self) -> Held:
        """What modules hold; a graph of a known shape does not ask."""
        return Held()

    @functools.cached_property
    def _members(self) -> Mapping[str, tuple[str, int]]:
        """Stack entries, by path."""
        return find_stacks([(clean_path(path), module) for path, module in self._model.named_modules()])[1]

    @functools.cached_property
    def _entries(self) -> frozenset[str]:
        """Paths of stack entries."""
        return frozenset(self._members)

    @property
    def listener(self) -> Listener | None:
        """What takes the calls of modules outside of backward passes, until they are read."""
        return self._forward

    @property
    def is_waiting(self) -> bool:
        """Whether the next backward pass will show more: keep the module hooks on until it is over, then `settle`."""
        return self._reading is not None

    def before_module(self, path: str, module: nn.Module | None = None) -> None:
        """Note that a module starts: without it, operations cannot be told to lie in one module or another.

        Args:
            path: the module's path.
            module: the module, whose parameters may be others than outside of its forward (FSDP).
        """
        listener = self._listener()
        if listener is not None:
            listener.before(path)
            if module is not None:
                self._held.note(path, module)

    def on_module(self, path: str, module: nn.Module, inputs: object, output: object) -> None:
        """Note a call of a module, from its forward hook.

        Args:
            path: the module's path.
            module: the module.
            inputs: its arguments, in any nesting.
            output: what it returned.
        """
        listener = self._listener()
        if listener is None:
            return
        is_outermost = listener.after(path, module, inputs, output)
        if is_outermost and listener is not self._forward:
            self._read_region(listener)

    def read(self, *outputs: Tensor) -> Topology:
        """Read the topology, before a backward pass has freed the graph.

        Args:
            outputs: loss or outputs of the model; without any, the graph behind all outputs of modules.

        Returns:
            The topology. Forwards after this one are not listened to, and a second call finds nothing.
        """
        roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
        listener, self._forward = self._forward, None
        if listener is None:
            return Topology(())
        known = None if self._memory is None or roots or not listener.keeps else self._memory.recall(listener)
        if known is not None:
            topology, self.live = known
            return topology
        if listener.hearing is not None:
            return Topology(())  # of another shape: names take all modules, which are listened to from the next one on
        return self._read(listener, roots)

    def _read(self, listener: Listener, roots: Sequence[Node]) -> Topology:
        graph, calls = listener.graph(roots)
        self._following = following(graph, calls, self._members)
        self._extras = Extras.of(self._model, listener, self._entries)
        if not listener.keeps:
            listener.forget()
        reading = Reading(graph, calls, self._model, self._entries, self._held)
        topology = self._completed(reading, {})
        self.gates = [*reading.gates(), *listener.outputs()]
        if listener.keeps:
            self.live = reading.live(topology, _tensors(listener, reading.graph))
        self._reading = reading if reading.expects_more() else None
        if self._memory is not None and self.live is not None and self._is_repeatable:
            self._memory.learn(listener, reading.graph, topology, self.live)
        return topology

    @property
    def _is_repeatable(self) -> bool:
        """Whether what was read depends on the shape of the graph alone."""
        own = {id(parameter) for parameter in self._model.parameters()}
        return not self.is_waiting and not self._extras.declarations and not self._held.beside(own)

    def settle(self) -> Topology | None:
        """Complete the topology after the backward pass.

        Returns:
            The topology, or None if the backward pass had nothing to add.
        """
        reading, self._reading = self._reading, None
        shown, self._shown, self._regions = self._shown, {}, {}
        if reading is None:
            return None
        return self._completed(reading, shown)

    def _completed(self, reading: Reading, regions: dict[Node, Topology]) -> Topology:
        return replace(self._extras.added(reading, regions), following=self._following)

    def _listener(self) -> Listener | None:
        """Where the calls of now belong: the forward, or a region that a reentrant checkpoint runs again."""
        if torch._C._current_graph_task_id() == -1:
            return self._forward
        if self._forward is None and not self.is_waiting:
            return None
        node = torch._C._current_autograd_node()
        if node is None or not node.name().startswith("CheckpointFunction") or not torch.is_grad_enabled():
            return None
        return self._regions.setdefault(node, Listener())

    def _read_region(self, listener: Listener) -> None:
        """Read what a region has shown so far, while its graph is there."""
        node = next(node for node, kept in self._regions.items() if kept is listener)
        self._shown[node], _ = Reading(*listener.graph(), self._model, self._entries).read()


def _tensors(listener: Listener, graph: Graph) -> dict[Key, Tensor]:
    """The kept tensors by their keys; of several with one key the first counts."""
    first: dict[Key | None, int] = {}
    for position, key in enumerate(listener.keys(graph)):
        first.setdefault(key, position)
    found = {key: listener.tensor(position) for key, position in first.items() if key is not None}
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def find(model: nn.Module, batch: object, loss_fn: Callable[[Any, Any], Tensor] | None = None) -> Topology:
    """Find the topology of a model with one forward; a backward pass follows only where the forward hides something.

    Args:
        model: any module; parameters, buffers, gradients, random state and modes are left as they are.
        batch: it gets ``*batch[:-1]`` of a tuple, ``**batch`` of a mapping, `batch` itself otherwise.
        loss_fn: ``loss_fn(output, batch)``; None means ``output.loss``.

    Returns:
        The residual sub-layers in execution order.

    Raises:
        BatchError: if the model raises on the batch.
        LossError: if the loss is not one real number that depends on the parameters.

    Example:
        >>> from keelscope.models import build
        >>> model = build("keel", depth=4, width=8, heads=2)
        >>> found = find(model, torch.ones(1, 3, dtype=torch.int64), lambda output, batch: output.mean())
        >>> [(sublayer.form, sublayer.alpha.value) for sublayer in found.sublayers][2:]
        [('n(a x + F(n x))', 4.0), ('n(a x + F(n x))', 4.0)]
        >>> found.schemes
        (('keel',),)
    """
    reader = GraphReader(model)
    with untouched(model), ExitStack() as hooks:
        for path, module in unwrapped(model).named_modules():
            _attach(reader, clean_path(path), module, hooks)
        loss = loss_of(model, batch, loss_fn)
        topology = reader.read(loss)
        if not reader.is_waiting:
            return topology
        backward(loss)
        return reader.settle() or topology


def _attach(reader: GraphReader, path: str, module: nn.Module, hooks: ExitStack) -> None:
    def before(_module: nn.Module, _args: object, _kwargs: object) -> None:
        reader.before_module(path)

    def after(_module: nn.Module, args: object, kwargs: object, output: object) -> None:
        reader.on_module(path, module, (args, kwargs), output)

    try:
        hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)
    except (RuntimeError, AttributeError):
        return
