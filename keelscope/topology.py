"""The topology of a model: its residual sub-layers, read from the autograd graph of one forward.

`GraphReader` is told of every module call while a forward runs (by `find`, or by the hooks of a recording), and then
reads the graph once: `keelscope.additions` finds the residual additions, `keelscope.trails` and `keelscope.sides` what
lies on shortcut, branch and stream, `keelscope.coefficients` the weights, `keelscope.schemes_by_form` the names. What
cannot be read is said to be unknown. Records hold no tensors and no nodes.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from keelscope.coefficients import Coefficient
from keelscope.graph import Graph, Key
from keelscope.leaves import floating_leaves
from keelscope.module_calls import ModuleCall
from keelscope.reading import Reading
from keelscope.sites import clean_path, is_norm
from keelscope.stacks import find_stacks
from keelscope.sublayer import Sublayer, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Coefficient", "GraphReader", "Sublayer", "Topology", "find"]

_Edge = tuple[Node, int]


@dataclass(frozen=True, slots=True)
class _SeenCall:
    """A module call by the nodes of its tensors."""

    path: str
    kind: str
    inputs: tuple[_Edge, ...]
    outputs: tuple[_Edge, ...]
    span: tuple[int, int]


class GraphReader:
    """Collects what modules took and gave during one forward, then reads the topology from the graph behind it.

    It keeps nodes of the graph, no tensors, and lets go of them when it has read.

    Args:
        model: the model, as the user has it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._calls: list[_SeenCall] = []
        self._open: list[tuple[str, int]] = []

    def before_module(self, path: str) -> None:
        """Note that a module starts: without it, operations cannot be told to lie in one module or another.

        Args:
            path: the module's path.
        """
        if not _in_backward():
            self._open.append((path, _sequence_number()))

    def on_module(self, path: str, module: nn.Module, inputs: object, output: object) -> None:
        """Note a call of a module, from its forward hook.

        Args:
            path: the module's path.
            module: the module.
            inputs: its arguments, in any nesting.
            output: what it returned.
        """
        if _in_backward():
            return
        start = -1
        while self._open:
            opened, number = self._open.pop()
            if opened == path:
                start = number
                break
        outputs = _edges(output, leaves=False)
        if outputs:
            span = (start, _sequence_number())
            self._calls.append(_SeenCall(path, _kind(module), _edges(inputs, leaves=True), outputs, span))

    def read(self, *outputs: Tensor) -> Topology:
        """Read the topology, once, before the graph is freed by a backward pass.

        Args:
            outputs: loss or outputs of the model; without any, the graph behind all outputs of modules.

        Returns:
            The topology. A second call finds nothing.
        """
        roots = [node for call in self._calls for node, _ in call.outputs]
        roots += [output.grad_fn for output in outputs if output.grad_fn is not None]
        graph = Graph(roots)
        calls = [
            ModuleCall(call.path, _keys(graph, call.inputs), _keys(graph, call.outputs), call.kind, call.span)
            for call in self._calls
        ]
        self._calls, self._open = [], []
        modules = [(clean_path(path), module) for path, module in self._model.named_modules()]
        _, entries = find_stacks(modules)
        return Reading(graph, self._model, calls, entries).topology()


def find(model: nn.Module, batch: object, loss_fn: Callable[[Any, Any], Tensor] | None = None) -> Topology:
    """Find the topology of a model with one forward.

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
    from keelscope.oneshot import _loss, _untouched

    reader = GraphReader(model)
    with _untouched(model), ExitStack() as hooks:
        for path, module in model.named_modules():
            _attach(reader, clean_path(path), module, hooks)
        return reader.read(_loss(model, batch, loss_fn))


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


def _kind(module: nn.Module) -> str:
    name = type(module).__name__.lower()
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent"
    if any(True for _ in module.children()):
        return "container"
    if is_norm(module):
        return "norm"
    return "dropout" if "drop" in name or name == "stochasticdepth" else ""


def _edges(value: object, *, leaves: bool) -> tuple[_Edge, ...]:
    """The nodes of all tensors in a nesting that have one; leaves that require a gradient on request."""
    found: list[_Edge] = []
    for _, tensor in floating_leaves(value):
        if not tensor.requires_grad:
            continue
        if tensor.grad_fn is not None:
            found.append((tensor.grad_fn, tensor.output_nr))
        elif leaves and not isinstance(tensor, nn.Parameter):
            edge = get_gradient_edge(tensor)
            found.append((edge.node, edge.output_nr))
    return tuple(found)


def _keys(graph: Graph, edges: Iterable[_Edge]) -> tuple[Key, ...]:
    return tuple(key for node, output in edges if (key := graph.key(node, output)) is not None)


def _sequence_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
