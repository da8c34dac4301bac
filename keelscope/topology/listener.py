"""Module calls of one stretch of a forward, as nodes of the autograd graph, until the graph is read.

`keelscope.topology.reader` keeps one for the forward and one per checkpointed region that a backward pass runs again.
Nodes are held, tensors are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from keelscope.leaves import floating_leaves
from keelscope.sites import is_norm
from keelscope.topology.graph import Graph, Key
from keelscope.topology.live import LiveOutput
from keelscope.topology.module_calls import ModuleCall

__all__ = ["Listener"]

_Edge = tuple[Node, int]
_GATE = re.compile(r"gat(e|es|er|ing)\b")
_MOST_ENTRIES = 1 << 22


@dataclass(frozen=True, slots=True)
class _SeenCall:
    """A module call by the nodes of its tensors."""

    path: str
    kind: str
    inputs: tuple[_Edge, ...]
    outputs: tuple[_Edge, ...]
    span: tuple[int, int]


class Listener:
    """Collects the calls of modules.

    Args:
        keep: also keep the tensors that modules took and gave, detached, until the listener is let go of.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._kept: dict[_Edge, tuple[Tensor, int]] | None = {} if keep else None
        self._calls: list[_SeenCall] = []
        self._open: list[tuple[str, int]] = []
        self.gate_like: dict[str, tuple[Node, int, Tensor, int]] = {}
        """First outputs of modules that are called gates: node, which of its outputs, the tensor and its version."""
        self.without_gradient: dict[str, None] = {}
        """Paths of modules that ran without a gradient."""

    @property
    def keeps(self) -> bool:
        """Whether tensors are kept."""
        return self._kept is not None

    def before(self, path: str) -> None:
        """A module starts."""
        self._open.append((path, _sequence_number()))

    def after(self, path: str, module: nn.Module, inputs: object, output: object) -> bool:
        """A module has ended.

        Args:
            path: its path.
            module: the module.
            inputs: its arguments, in any nesting.
            output: what it returned.

        Returns:
            Whether no other module is running.
        """
        start = -1
        while self._open and start < 0:
            opened, number = self._open.pop()
            start = number if opened == path else -1
        outputs = self._edges(output, leaves=False)
        if outputs:
            span = (start, _sequence_number())
            self._calls.append(_SeenCall(path, _kind(module), self._edges(inputs, leaves=True), outputs, span))
            self._note_gate(path, module, output)
        elif torch.is_grad_enabled():
            self.without_gradient[path] = None
        return not self._open

    def _note_gate(self, path: str, module: nn.Module, output: object) -> None:
        if path in self.gate_like or not _GATE.search(f"{path.rpartition('.')[2]} {type(module).__name__}".lower()):
            return
        leaves = [tensor for _, tensor in floating_leaves(output)]
        node = leaves[0].grad_fn if len(leaves) == 1 else None
        if node is not None and leaves[0].numel() <= _MOST_ENTRIES:
            self.gate_like[path] = node, leaves[0].output_nr, leaves[0].detach(), leaves[0]._version

    def outputs(self) -> list[LiveOutput]:
        """What modules that are called gates put out, unless something was written into it since."""
        kept = [(path, *noted) for path, noted in self.gate_like.items() if noted[2]._version == noted[3]]
        return [LiveOutput(path, node, output, tensor) for path, node, output, tensor, _ in kept]

    def ended(self) -> dict[str, int]:
        """When the first call of each module with a gradient ended."""
        return {call.path: call.span[1] for call in reversed(self._calls)}

    def graph(self, roots: Iterable[Node] = ()) -> tuple[Graph, list[ModuleCall]]:
        """The graph behind all outputs, and the calls as tensors of it.

        Args:
            roots: further nodes to start from.

        Returns:
            Graph and calls, in the order in which they ended.
        """
        graph = Graph([*(node for call in self._calls for node, _ in call.outputs), *roots])
        calls = [
            ModuleCall(call.path, _keys(graph, call.inputs), _keys(graph, call.outputs), call.kind, call.span)
            for call in self._calls
        ]
        return graph, calls

    def tensors(self, graph: Graph) -> dict[Key, Tensor]:
        """The kept tensors that nothing has written into since, by their keys in a graph."""
        kept = (self._kept or {}).items()
        found = {graph.key(*edge): tensor for edge, (tensor, version) in kept if tensor._version == version}
        return {key: tensor for key, tensor in found.items() if key is not None}

    def _edges(self, value: object, *, leaves: bool) -> tuple[_Edge, ...]:
        """The nodes of all tensors in a nesting that have one; leaves that require a gradient on request."""
        found: list[_Edge] = []
        for _, tensor in floating_leaves(value):
            edge = _edge(tensor, leaves=leaves)
            if edge is None:
                continue
            found.append(edge)
            if self._kept is not None:
                self._kept.setdefault(edge, (tensor.detach(), tensor._version))
        return tuple(found)


def _edge(tensor: Tensor, *, leaves: bool) -> _Edge | None:
    if not tensor.requires_grad:
        return None
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    if leaves and not isinstance(tensor, nn.Parameter):
        edge = get_gradient_edge(tensor)
        return edge.node, edge.output_nr
    return None


def _kind(module: nn.Module) -> str:
    name = type(module).__name__.lower()
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent"
    if any(True for _ in module.children()):
        return "container"
    if is_norm(module):
        return "norm"
    return "dropout" if "drop" in name or name == "stochasticdepth" else ""


def _keys(graph: Graph, edges: Iterable[_Edge]) -> tuple[Key, ...]:
    return tuple(key for node, output in edges if (key := graph.key(node, output)) is not None)


def _sequence_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())
