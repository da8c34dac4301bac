"""One module call whose Jacobian can be measured, from the hook on its output while the backward pass is there.

`keelscope.hooks` makes a `Span` when the module has run and turns it into a `Passage` when the gradient arrives. The
span sits in a hook of the graph itself, so that it refers to what lies before the module only: a reference to the
output would keep the graph alive for ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import Node

from keelscope.errors import CoverageWarning
from keelscope.jacobian.linearised import Entry, NotLinearisableError, linearised
from keelscope.jacobian.operators import Operator

__all__ = ["JacobianCalls", "Memory", "Passage", "Span"]

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")
_SEED = 0x6A61636F

Key = tuple[int, int]
"""A tensor of the graph: number of the node that made it, and which output."""


@dataclass(slots=True)
class Memory:
    """What is kept from one module to the next: random numbers of our own, and what probes carry down the stack."""

    generators: dict[torch.device, Generator] = field(default_factory=dict)
    carried: dict[str, tuple[int, Key, object]] = field(default_factory=dict)

    def generator(self, device: torch.device) -> Generator:
        """A generator that the user's draws do not depend on, on the same device."""
        if device not in self.generators:
            self.generators[device] = Generator(device).manual_seed(_SEED)
        return self.generators[device]


@dataclass(frozen=True, slots=True)
class Passage:
    """The Jacobian J of one call of a module, while the backward pass stands at its output.

    `operator` multiplies with it: ``vjp`` with the transpose, ``jvp`` with J itself.
    """

    operator: Operator
    generator: Generator
    """For random vectors; independent of the model's."""
    memory: Memory
    above: Key
    below: Key

    def carried(self, name: str) -> object | None:
        """What the module right above left under a name in this backward pass; None at the top of a chain."""
        task, place, value = self.memory.carried.get(name, (-1, self.below, None))
        return value if task == torch._C._current_graph_task_id() and place == self.above else None

    def leave(self, name: str, value: object) -> None:
        """Leave something for the module right below."""
        self.memory.carried[name] = (torch._C._current_graph_task_id(), self.below, value)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """What has to be known of a call before its backward pass."""

    entry: Entry
    output: int
    """Which output of its node the hooked tensor is."""
    above: Key
    """The module's output as the next module takes it."""

    def passage(self, memory: Memory, node: Node) -> Passage:
        """The Jacobian, as long as the graph is whole.

        Args:
            memory: of the watch.
            node: the one that made the hooked tensor.

        Returns:
            The passage.

        Raises:
            NotLinearisableError: if there is none to be had.
        """
        operator = linearised(node, self.output, self.entry)
        below = int(self.entry.node._sequence_nr()), self.entry.output
        return Passage(operator, memory.generator(operator.device), memory, self.above, below)


class JacobianCalls:
    """Follows calls of modules from the input to the gradient at the output."""

    def __init__(self) -> None:
        self.refused: dict[int, str] = {}
        """Sites with a call whose Jacobian could not be measured, and why."""
        self._memory = Memory()
        self._entered: dict[int, list[Entry | None]] = {}
        self._said: set[str] = set()

    def begin(self) -> None:
        """Start a step."""
        self._entered.clear()
        self._memory.carried.clear()

    def enter(self, site: int, inputs: Sequence[Tensor]) -> None:
        """A module is about to run on these floating inputs."""
        tracked = (tensor for tensor in inputs if tensor.requires_grad)
        tensor = next(tracked, None) if torch.is_grad_enabled() else None
        self._entered.setdefault(site, []).append(None if tensor is None else Entry.of(tensor))

    def leave(self, site: int, module: nn.Module, output: Tensor, hooked: Tensor) -> Span | None:
        """A module has run.

        Args:
            site: where.
            module: the module.
            output: its first output that requires a gradient.
            hooked: the tensor that carries the gradient hook.

        Returns:
            The span; None if the Jacobian cannot be measured here.
        """
        waiting = self._entered.get(site)
        entry = waiting.pop() if waiting else None
        why = _refusal(module, entry, output)
        if why or entry is None:
            self.refuse(site, why)
            return None
        assert output.grad_fn is not None
        above = int(output.grad_fn._sequence_nr()), output.output_nr
        return Span(entry, hooked.output_nr, above)

    def passage(self, site: int, span: Span) -> Passage | None:
        """The gradient has arrived; None if the Jacobian cannot be measured."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.refuse(site, "is differentiated inside a functorch transform")
            return None
        try:
            return span.passage(self._memory, torch._C._current_autograd_node())
        except NotLinearisableError as error:
            self.refuse(site, str(error))
            return None

    def refuse(self, site: int, why: str) -> None:
        """Note why a Jacobian is missing, and say it once."""
        self.refused[site] = f"Its Jacobian is not recorded: it {why}."
        if why not in self._said:
            self._said.add(why)
            text = f"A Jacobian is not recorded: the module {why}. watch.coverage lists the modules."
            warnings.warn(text, CoverageWarning, stacklevel=5)


def _refusal(module: nn.Module, entry: Entry | None, output: Tensor) -> str:
    """Why the Jacobian of a call will not be measured; empty if it may be."""
    if any(kind.__name__ in _SHARDED for inner in module.modules() for kind in type(inner).__mro__):
        return "is sharded by FSDP: a second pass would gather its weights out of turn"
    if type(output) is not Tensor:
        return f"puts out a {type(output).__name__}, not a plain tensor"
    if entry is None:
        return "has no input that requires a gradient, or is run again inside the backward pass (checkpointing)"
    return "puts out a leaf" if output.grad_fn is None else ""
