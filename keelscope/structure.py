"""The residual structure of the watched model, read while its first recorded step runs.

Every module is listened to during that one forward (`keelscope.topology.GraphReader`), and the graph is read when the
first gradient arrives, before backward has freed anything. No forward of its own is run. On steps where probes look at
residual sub-layers (`keelscope.residuals`) the modules are listened to again, since each step has a graph of its own,
and from the end of the step before, so that no call of the forward is missed. The graph is read again only
if it has another shape than before (`keelscope.topology.memory`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter

import torch
from torch import Tensor, nn

from keelscope.containment import contained, warn_once
from keelscope.ears import Ears
from keelscope.identities import Identities
from keelscope.leaves import floating_leaves, hook_gradient
from keelscope.recomputation import in_backward
from keelscope.store.columns import Columns
from keelscope.topology import GraphReader, LiveGate, LiveGraph, LiveOutput, Sublayer, Topology
from keelscope.topology.listener import Listener
from keelscope.topology.memory import Memory
from keelscope.unwinding import Breaks, give_up_dead

__all__ = ["Look"]

_log = logging.getLogger(__name__)
_MOST_FORWARDS = 8


class Look:
    """Listens to one forward of a model on some steps and keeps what its graph says about residual sub-layers.

    Args:
        model: the watched model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.topology: Topology | None = None
        """What the first look found."""
        self.on_read: Callable[[Topology, LiveGraph], None] = _ignore
        """Called with the sub-layers and their live graph, on steps where tensors are kept."""
        self.on_gates: Callable[[Topology, Sequence[LiveGate | LiveOutput], bool], None] = _ignore_gates
        """Called at the first look, with the sub-layers, the weights that depend on data, and whether that is all."""
        self._ran, self._running = Identities(), set[int]()  # on looks that are over, and since
        self._model = weakref.ref(model)
        self._reader: GraphReader | None = None
        self._memory = Memory()
        self._ears: Ears | None = None
        """On every module of the last look."""
        self._is_placed = self._keeps = False
        self.listener: Listener | None = None
        """What later looks need of the forward: no names, which the first look has found."""
        self._begins, self._breaks = BeforeBackward(weakref.ref(self)), Breaks()
        self.is_read = False
        """Whether nothing is left to read on this look."""
        self._is_first = True
        self._is_ahead = self._stays = False
        self._left = 0

    @property
    def ran(self) -> Set[int]:
        """Identity of every module that ran while listened to."""
        return self._running | self._ran

    @property
    def fringe(self) -> frozenset[str] | None:
        """Modules in which the forward to come begins and ends, see `keelscope.topology.memory.Memory`."""
        return self._memory.fringe if self._is_placed else None

    def listen(self, modules: Sequence[tuple[str, nn.Module]], *, keep: bool, ahead: bool = False) -> None:
        """Put hooks on modules, until the first gradient arrives.

        Args:
            modules: all modules with their paths.
            keep: keep what they take and give until then, for `on_read`.
            ahead: the step has not begun, its first forward is heard from the start; asked again when it has.
        """
        was_ahead, self._is_ahead = self._is_ahead, ahead
        is_chosen = self._ears is not None and self._ears.hearing is self._memory.hearing
        if was_ahead and not ahead and self._keeps is keep and self._is_placed and is_chosen and self._are_on(modules):
            if self._reader is not None and self._reader.listener is not None:
                self._reader.listener.is_early = False
            return
        self._settle()
        model = self._model()
        if model is None:
            self.stop()
            return
        self._choose(modules)
        self._keeps, self._stays = keep, ahead
        self._prepare(model, _MOST_FORWARDS * len(modules))
        self._hang(on=True)
        if self._ears is not None:
            self._ears.heed(modules)

    def hear_all(self) -> None:
        """The model has changed: listen to all modules, as long as graphs do not repeat their shape again."""
        self._memory.hear_all()

    def _doubt(self) -> None:
        """What was listened to was not read: whatever trained, if anything did, ran where nobody listened."""
        if self._reader is not None and self._keeps and not self.is_read:
            self._memory.doubt()

    def _choose(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        """Those of the modules to be listened to."""
        is_new = not self._are_on(modules)
        if self._ears is None or is_new:
            self._hang(on=False)
            self._ears = Ears(modules, weakref.ref(self))
            self._running |= self._ears.refused()
            self.hear_all()
        if self._ears.hearing is not self._memory.hearing:
            self._hang(on=False)
            self._ears.choose(self._memory.hearing)

    def expect(self, modules: Sequence[tuple[str, nn.Module]], *, due: bool) -> None:
        """A step is over, and what comes next belongs to another one.

        Args:
            modules: see `listen`.
            due: whether tensors are to be kept of the step to come.
        """
        if due:
            self._doubt()
            self.listen(modules, keep=True, ahead=True)
        elif self._is_placed:
            self.stop()

    def _are_on(self, modules: Sequence[tuple[str, nn.Module]]) -> bool:
        return self._ears is not None and self._ears.are_on(modules)

    def _prepare(self, model: nn.Module, most: int) -> None:
        """A new reader, which takes no more calls than so many."""
        self._reader, self.is_read = GraphReader(model, keep=self._keeps, memory=self._memory), False
        self._left = most
        heard = self._reader.listener
        if heard is not None and self._ears is not None:
            heard.limit(most, self._ears.wrappers, self._ears.hearing, self._begins, self._breaks)
            heard.is_early = self._is_ahead
        self.listener = None if self._is_first else heard

    @contained
    def read(self) -> None:
        """Read the graph, once per look; called when the first gradient arrives.

        The hooks stay on if the rest of the backward pass will show more (regions that it runs again).
        """
        model = self._model()
        if self._reader is None or self.is_read or model is None:
            return
        if self._is_ahead:  # of something that was run between the steps
            self._prepare(model, self._left)
            return
        self.is_read = True
        self._let_go()
        if self._is_first:  # reading takes the most
            self._ran.update(self._running)
            self._running.clear()
        if self._is_first or not self._stays:
            self._hang(on=False)  # first: on many modules they take as much memory as the graph
        reader, self._reader = self._reader, None  # let go of, should reading fail
        topology = reader.read()
        gates, reader.gates = reader.gates, []
        if self._is_first:
            self.topology = topology
            self.on_gates(topology, gates, not reader.is_waiting)
        live, reader.live = reader.live, None
        if live is not None:
            self.on_read(topology, live)
        elif self._keeps:
            _log.info("structure: a graph of another structure than before; its sub-layers are not recorded.")
        self._reader = reader
        if reader.is_waiting and self._is_first:
            self._hang(on=True)
        elif self._stays:
            self._settle()
        else:
            self.stop()

    def finish(self) -> None:
        """The step is over: `stop`, unless the one to come is listened to already."""
        if self._is_ahead:
            return
        if self._reader is not None or self._is_placed or self._running:
            self.stop()
        else:
            give_up_dead()

    @contained
    def stop(self) -> None:
        """Give the hooks back, complete what was read, and let go of the graph."""
        self._doubt()
        self._is_ahead = self._stays = False
        self._let_go()
        self._hang(on=False)
        if not self._keeps:
            self._ears = None  # no other look will need them
            self._ran.update(self._running)
            self._running = set()
        self._settle()

    def _settle(self) -> None:
        """Complete what was read, and let go of the graph."""
        self._let_go()
        give_up_dead()
        reader, self._reader = self._reader, None
        if reader is None or self.topology is None:
            return
        settled = reader.settle()
        if self._is_first:
            found = settled or self.topology
            self.topology = replace(found, sublayers=Columns(Sublayer, found.sublayers))
            for reason in self.topology.unknown:
                _log.info("structure: %s", reason)
        self._is_first = False

    def took(self, listener: Listener, path: str, module: nn.Module, inputs: object, output: object) -> None:
        """A call of a module, on looks after the first."""
        if torch.is_grad_enabled() or not self._is_ahead:  # others may run any number of times between steps
            self._running.add(id(module))
            self._left -= 1
        if self._left < 0 or len(listener.rows) >= listener.most:
            self.stop()
            return
        try:
            listener.after(path, module, inputs, output)
        except Exception as error:
            warn_once(self, error)

    def _hang(self, *, on: bool) -> None:
        if self._is_placed is on or self._ears is None:
            return
        self._is_placed = on
        if on or self._keeps:
            self._ears.hang(on=on)
        else:
            self._ears.take_off()

    def _let_go(self) -> None:
        listener, self.listener = self.listener, None
        if listener is not None and listener.hearing is None:  # a few are those of earlier looks
            self._running.update(map(id, map(itemgetter(1), listener.rows)))

    @contained
    def starts(self, path: str, module: nn.Module) -> None:
        """A module starts, on the first look or inside a backward pass, or when nobody listens any more."""
        if self._reader is not None:
            self._reader.before_module(path, module)
        elif not in_backward():  # another forward of the step
            self._hang(on=False)

    @contained
    def ends(self, path: str, module: nn.Module, inputs: object, output: object) -> None:
        """A module has ended, on the first look, inside a backward pass, or the model itself."""
        self._running.add(id(module))
        self._left -= 1
        if self._left < 0:  # forwards without a backward pass would pile up their graphs here
            self.stop()
        elif self._reader is not None:
            self._reader.on_module(path, module, inputs, output)
            heard = self._reader.listener
            is_outermost = not path or (heard is not None and not heard.is_inside)
            if is_outermost and not in_backward():
                self.ended(output)

    @contained
    def ended(self, output: object) -> None:
        """See to it that the graph is read before anything of the model has run backward."""
        for _, tensor in floating_leaves(output):
            if tensor.grad_fn is not None and self._begins not in (tensor._backward_hooks or ()):
                hook_gradient(tensor, self._begins, self._breaks)


@dataclass(frozen=True, slots=True, eq=False)
class BeforeBackward:
    """Hook on an output of the model."""

    owner: weakref.ref[Look]

    def __call__(self, _: Tensor) -> None:
        """A backward pass begins."""
        look = self.owner()
        if look is not None and not look.is_read:
            look.read()


def _ignore_gates(_: Topology, __: Sequence[LiveGate | LiveOutput], ___: bool) -> None:
    """Nobody asked."""


def _ignore(_: Topology, __: LiveGraph) -> None:
    """Nobody asked."""
