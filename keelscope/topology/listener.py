"""Module calls of one stretch of a forward, as nodes of the autograd graph, until the graph is read.

`keelscope.topology.reader` keeps one for the forward and one per checkpointed region that a backward pass runs again.
Nodes are held, tensors only where they are asked for.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from keelscope import kernel_calls
from keelscope.entries import is_measurable
from keelscope.leaves import floating_leaves
from keelscope.sites import is_norm
from keelscope.topology.graph import Graph, Key
from keelscope.topology.hearing import Hearing
from keelscope.topology.live import LiveOutput
from keelscope.topology.module_calls import ModuleCall
from keelscope.unwinding import Breaks

__all__ = ["Listener", "SeenCall"]

_Row: TypeAlias = tuple[str, nn.Module, tuple[int, int], int, int, int]
_GATE = re.compile(r"gat(e|es|er|ing)\b")
_MOST_ENTRIES = 1 << 22


class SeenCall(NamedTuple):
    """A module call: what it took and gave is found in the lists of the `Listener`."""

    path: str
    module: nn.Module
    span: tuple[int, int]
    """Autograd's sequence numbers before and after it."""
    first: int
    """Position of its first output."""
    middle: int
    """Position of its first input."""
    last: int
    """The position after its last input."""


class Listener:
    """Collects the calls of modules.

    Args:
        keep: also keep the tensors that modules took and gave, until the listener is let go of.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self.keeps = keep
        """Whether tensors are kept."""
        self.rows: list[_Row] = []
        """The fields of a `SeenCall` for each call, in the order in which they ended."""
        self.most = sys.maxsize
        """Calls that `hear` takes at most."""
        self.hear: Callable[..., int] = _leave
        """Takes a path and what a hook gets before or after the call, if the compiled kernel can: tensors in, one
        tensor with a gradient out. Gives 0 where `before` or `after` is to be called, 2 where a call was noted,
        `is_inside` is False and no hook put on what it gave, 1 where nothing is left to do."""
        self.nodes: list[Node] = []
        """The node of each tensor with a gradient that a call gave or took."""
        self.slots: list[int] = []
        """Which of the node's outputs it is."""
        self._tensors: list[Tensor | None] = []
        self._versions: list[int] = []
        self._open: list[tuple[str, int]] = []
        self._floor: list[int] = [-1, False]
        """How many open calls are around the first call of a forward, -1 before that has ended; and `is_early`."""
        self.wrappers: frozenset[str] = frozenset()
        """Paths of modules that are no more than a frame around others: what these give is looked at too."""
        self.gate_like: dict[str, tuple[Node, int, Tensor, int]] = {}
        """First outputs of modules that are called gates: node, which of its outputs, the tensor and its version."""
        self.hearing: Hearing | None = None
        """The modules that are listened to; None for all."""
        self.outermost: set[str] = set()
        """Paths of modules that ran inside no other, wrappers aside; gathered by the hooks."""
        self.without_gradient: dict[str, None] = {}
        """Paths of modules that ran without a gradient."""

    @property
    def calls(self) -> Iterator[SeenCall]:
        """In the order in which they ended."""
        return map(SeenCall._make, self.rows)

    def limit(
        self,
        most: int,
        wrappers: frozenset[str],
        hearing: Hearing | None = None,
        begins: Callable[[Tensor], None] | None = None,
        breaks: Breaks | None = None,
    ) -> None:
        """Get ready for the calls of a model.

        Args:
            most: how many are taken at most.
            wrappers: see there.
            hearing: see there.
            begins: a hook for what modules put out that ran inside no other, where that is not left to `hear`'s caller.
            breaks: told of the nodes that it is put on.
        """
        self.most, self.wrappers, self.hearing = most, wrappers, hearing
        if self.keeps:
            lists = self.rows, self.nodes, self.slots, self._tensors, self._versions
            ends: frozenset[str] = frozenset() if hearing is None else hearing.ended
            limits = self._floor, wrappers, most, ends, self.outermost
            self.hear = kernel_calls.hearing(_sequence_number, self._open, *lists, *limits, begins, breaks) or _leave

    @property
    def is_early(self) -> bool:
        """Whether the step is yet to begin: only the latest forward is kept, which may be the one that begins it."""
        return bool(self._floor[1])

    @is_early.setter
    def is_early(self, is_early: bool) -> None:
        self._floor[1] = is_early

    @property
    def is_inside(self) -> bool:
        """Whether a module is running, but for those around the first call of a forward, and wrappers."""
        inner = self._open[max(self._floor[0], 0) :]
        return any(path not in self.wrappers for path, _ in inner)

    def before(self, path: str) -> None:
        """A module starts."""
        running = self._open
        if not running or any(path == other for other, _ in running):  # a forward that raised has left its calls open
            self._floor[0] = -1
            if self.is_early:
                for noted in (running, self.rows, self.nodes, self.slots, self._tensors, self._versions):
                    noted.clear()
                self.gate_like.clear()
        running.append((path, _sequence_number()))

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
        start = self._opened(path)
        if self._floor[0] < 0:
            self._floor[0] = len(self._open)
        first = len(self.nodes)
        self._note(output, leaves=False)
        middle = len(self.nodes)
        if middle > first:
            span = (start, _sequence_number())
            for value in _plain(inputs):
                self._note(value, leaves=True)
            self.rows.append((path, module, span, first, middle, len(self.nodes)))
            name = path.rpartition(".")[2]
            if _is_gate("" if name.isdecimal() else name, type(module).__name__):  # what is remembered stays few
                self._note_gate(path, output)
        elif torch.is_grad_enabled():
            self.without_gradient[path] = None
        return not self._open

    def _opened(self, path: str) -> int:
        """When the latest call of a module that has not ended began; -1 if its beginning was not seen."""
        while any(path == other for other, _ in self._open):
            opened, number = self._open.pop()
            if opened == path:
                return number
        return -1

    def _note(self, value: object, *, leaves: bool) -> None:
        """Note all tensors in a nesting that have a node; leaves that require a gradient on request."""
        if type(value) is Tensor:
            self._note_one(value, leaves=leaves)
        elif value is not None:
            for _, tensor in floating_leaves(value):
                self._note_one(tensor, leaves=leaves)

    def _note_one(self, tensor: Tensor, *, leaves: bool) -> None:
        if not tensor.requires_grad or not is_measurable(tensor):
            return
        node, slot = tensor.grad_fn, tensor.output_nr
        if node is None and leaves and not isinstance(tensor, nn.Parameter):
            edge = get_gradient_edge(tensor)
            node, slot = edge.node, edge.output_nr
        if node is not None:
            self.nodes.append(node)
            self.slots.append(slot)
            if self.keeps:
                self._tensors.append(tensor)
                self._versions.append(tensor._version)

    def _note_gate(self, path: str, output: object) -> None:
        leaves = [tensor for _, tensor in floating_leaves(output)]
        node = leaves[0].grad_fn if len(leaves) == 1 else None
        if path not in self.gate_like and node is not None and leaves[0].numel() <= _MOST_ENTRIES:
            self.gate_like[path] = node, leaves[0].output_nr, leaves[0].detach(), leaves[0]._version

    def outputs(self) -> list[LiveOutput]:
        """What modules that are called gates put out, unless something was written into it since."""
        kept = [(path, *noted) for path, noted in self.gate_like.items() if noted[2]._version == noted[3]]
        return [LiveOutput(path, node, output, tensor) for path, node, output, tensor, _ in kept]

    def operations_since(self) -> int | None:
        """How many operations followed the end of the last call that was heard; None in another thread than these."""
        since = _sequence_number() - self.rows[-1][2][1] if self.rows else -1
        return since if since >= 0 else None

    def ended(self) -> dict[str, int]:
        """When the first call of each module with a gradient ended."""
        return {path: span[1] for path, _, span, *_ in reversed(self.rows)}

    def graph(self, roots: Iterable[Node] = ()) -> tuple[Graph, list[ModuleCall]]:
        """The graph behind all outputs, and the calls as tensors of it.

        Args:
            roots: further nodes to start from.

        Returns:
            Graph and calls, in the order in which they ended.
        """
        graph = Graph([*(node for call in self.calls for node in self.nodes[call.first : call.middle]), *roots])
        keys = self.keys(graph)
        calls = [
            ModuleCall(
                call.path, _found(keys[call.middle : call.last]), _found(keys[call.first : call.middle]),
                _kind(call.module), call.span,
            )
            for call in self.calls
        ]  # fmt: skip
        return graph, calls

    def keys(self, graph: Graph) -> list[Key | None]:
        """The noted tensors by their keys in a graph."""
        return [graph.key(node, slot) for node, slot in zip(self.nodes, self.slots, strict=True)]

    def forget(self) -> None:
        """Let go of the calls: what was read of them needs them no longer."""
        for noted in (self.rows, self.nodes, self.slots):
            noted.clear()

    def complete(self, rows: list[_Row], nodes: list[Node], slots: list[int]) -> None:
        """Take in the calls of all modules, where the graph says what those were that were not listened to.

        Args:
            rows: the calls.
            nodes: the node of each tensor that one of them gave or took.
            slots: which of the node's outputs it is.
        """
        heard = zip(self.nodes, self.slots, self._tensors, self._versions, strict=True)
        kept = {(node, slot): (tensor, version) for node, slot, tensor, version in heard}
        found = [kept.get(key, (None, 0)) for key in zip(nodes, slots, strict=True)]
        self.rows, self.nodes, self.slots, self.hearing = rows, nodes, list(slots), None
        self._tensors, self._versions = [tensor for tensor, _ in found], [version for _, version in found]

    def kept(self, positions: bytes) -> list[Tensor] | None:
        """Several of the kept tensors; None where something was written into one since."""
        return kernel_calls.kept_tensors(self._tensors, self._versions, positions)

    @property
    def held(self) -> tuple[list[Tensor | None], list[int]]:
        """The kept tensors, and the version of each when it was kept."""
        return self._tensors, self._versions

    def tensor(self, position: int) -> Tensor | None:
        """A kept tensor, unless something was written into it since."""
        tensor = self._tensors[position]
        return tensor if tensor is not None and tensor._version == self._versions[position] else None


def _leave(*_: object) -> int:
    """Without the compiled kernel."""
    return 0


def _plain(inputs: object) -> tuple[object, ...]:
    """Arguments of a call, the usual one tensor without its nesting."""
    if type(inputs) is tuple and len(inputs) == 2 and type(inputs[0]) is tuple and not inputs[1]:
        return inputs[0]
    return (inputs,)


@functools.lru_cache(maxsize=4096)
def _is_gate(name: str, kind: str) -> bool:
    return _GATE.search(f"{name} {kind}".lower()) is not None


def _kind(module: nn.Module) -> str:
    name = type(module).__name__.lower()
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent"
    if any(True for _ in module.children()):
        return "container"
    if is_norm(module):
        return "norm"
    return "dropout" if "drop" in name or name == "stochasticdepth" else ""


def _found(keys: Iterable[Key | None]) -> tuple[Key, ...]:
    return tuple(key for key in keys if key is not None)


_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
