"""The residual structure of the watched model, read while its first recorded step runs.

Every module is listened to during that one forward (`keelscope.topology.GraphReader`), and the graph is read when the
first gradient arrives, before backward has freed anything. No forward of its own is run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from torch import nn

from keelscope.containment import contained
from keelscope.hooks import NO_OP
from keelscope.sites import SitePlan
from keelscope.store.schema import Stack, SublayerInfo
from keelscope.topology import GraphReader, Sublayer, Topology

__all__ = ["FirstLook", "count_sublayers", "describe"]

_log = logging.getLogger(__name__)
_MOST_FORWARDS = 8


class FirstLook:
    """Listens to one forward of a model and keeps what its graph says about residual sub-layers.

    Args:
        model: the watched model.
        plan: its modules.
    """

    def __init__(self, model: nn.Module, plan: SitePlan) -> None:
        self.topology: Topology | None = None
        self._reader: GraphReader | None = GraphReader(model)
        self._handles = ExitStack()
        self._modules = plan.everything
        self._left = _MOST_FORWARDS * len(plan.everything)

    def listen(self) -> None:
        """Put hooks on every module, until the first gradient arrives."""
        for path, module in self._modules:
            self._listen(path, module)
        self._modules = ()

    @contained
    def read(self) -> None:
        """Read the graph, once; called when the first gradient arrives.

        The hooks stay on if the rest of the backward pass will show more (regions that it runs again).
        """
        if self._reader is None or self._modules or self.topology is not None:
            return
        reader, self._reader = self._reader, None  # let go of, should reading fail
        self.topology = reader.read()
        self._reader = reader
        if not reader.is_waiting:
            self.stop()

    @contained
    def stop(self) -> None:
        """Give the hooks back, complete what was read, and let go of the graph."""
        self._handles.close()
        self._modules = ()
        reader, self._reader = self._reader, None
        if reader is None or self.topology is None:
            return
        self.topology = reader.settle() or self.topology
        for reason in self.topology.unknown:
            _log.info("structure: %s", reason)

    def _listen(self, path: str, module: nn.Module) -> None:
        owner = weakref.ref(self)
        try:
            before = module.register_forward_pre_hook(BeforeModule(owner, path), with_kwargs=True)
            after = module.register_forward_hook(AfterModule(owner, path), with_kwargs=True)
        except (RuntimeError, AttributeError):
            return  # a scripted module takes no hooks; what it does is unknown
        self._handles.callback(before.remove)
        self._handles.callback(after.remove)

    @contained
    def _before(self, path: str) -> None:
        if self._reader is not None:
            self._reader.before_module(path)

    @contained
    def _after(self, path: str, module: nn.Module, inputs: object, output: object) -> None:
        self._left -= 1
        if self._left < 0:  # forwards without a backward pass would pile up their graphs here
            self.stop()
        elif self._reader is not None:
            self._reader.on_module(path, module, inputs, output)


@dataclass(frozen=True, slots=True, eq=False)
class BeforeModule:
    """Hook before one module; a copy of the module carries a no-op in its place."""

    owner: weakref.ref[FirstLook]
    path: str

    def __call__(self, *_: object) -> None:
        """Note that the module starts."""
        look = self.owner()
        if look is not None:
            look._before(self.path)

    def __reduce__(self) -> tuple[object, ...]:
        return NO_OP


@dataclass(frozen=True, slots=True, eq=False)
class AfterModule:
    """Hook after one module; a copy of the module carries a no-op in its place."""

    owner: weakref.ref[FirstLook]
    path: str

    def __call__(self, module: nn.Module, *arguments: object) -> None:
        """Note what the module took and gave, by the nodes of its tensors."""
        look = self.owner()
        # A hook that another hook of the same call has just taken off is called once more, without keyword arguments.
        if look is not None and len(arguments) == 3:
            look._after(self.path, module, arguments[:2], arguments[2])

    def __reduce__(self) -> tuple[object, ...]:
        return NO_OP


def describe(topology: Topology | None) -> tuple[SublayerInfo, ...]:
    """A topology as it is stored in a run file.

    Args:
        topology: what was read, or None.

    Returns:
        One entry per sub-layer, in execution order.
    """
    return tuple(_describe(sublayer) for sublayer in topology.sublayers) if topology is not None else ()


def _describe(sublayer: Sublayer) -> SublayerInfo:
    return SublayerInfo(
        form=sublayer.form,
        schemes=sublayer.schemes,
        site=sublayer.site or "",
        branch=sublayer.branch or "",
        norm_before=sublayer.norm_before or "",
        norm_after=sublayer.norm_after or "",
        alpha=sublayer.alpha.value,
    )


def count_sublayers(stacks: Sequence[Stack], topology: Topology | None, plan: SitePlan) -> tuple[Stack, ...]:
    """Stacks with their number of sub-layers per entry, where each entry holds the same number.

    What the block class declares goes before what the graph shows.

    Args:
        stacks: as found in the module tree.
        topology: what was read, or None.
        plan: the sites, which know where each path lies.

    Returns:
        The stacks.
    """
    found: dict[tuple[str, int], int] = {}
    for sublayer in topology.sublayers if topology is not None else ():
        paths = [path for path in (*sublayer.branch_sites, sublayer.site) if path]
        inside = next((place for path in paths if (place := plan.place(path))[0]), None)
        if inside is not None:
            found[inside] = found.get(inside, 0) + 1
    return tuple(_counted(stack, found) for stack in stacks)


def _counted(stack: Stack, found: dict[tuple[str, int], int]) -> Stack:
    counts = {found.get((stack.path, position), 0) for position in range(stack.length)}
    return replace(stack, sublayers=counts.pop()) if not stack.sublayers and len(counts) == 1 else stack
