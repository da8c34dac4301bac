"""What probes of residual sub-layers see on one step: the operands of each sum, and the gradients around it.

`keelscope.recorder` hands over the live graph when the first gradient arrives; `keelscope.paths` splits the gradients.
One forward of a step is looked at, the first one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from keelscope import kernel_residuals
from keelscope.board import Board
from keelscope.calls import TermSlots, terms_of
from keelscope.containment import warn_once
from keelscope.errors import CoverageWarning
from keelscope.pages import Block, Blocks, no_blocks
from keelscope.paths import PathFlow, PathGradients, Routes
from keelscope.probe import Axis, Probe, Tap, TensorProbe, Tensors, sees_everything
from keelscope.statistics import Terms
from keelscope.topology import LiveGraph, Operands, Places, Topology

__all__ = ["ResidualHooks"]

_ROUTES = "routes of gradients"
_Name = tuple[str, int]
_Key = tuple[str, Terms]
_Task = tuple[Probe, tuple[tuple[_Key, Terms], ...]]
_Due = list[_Task]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Terms of one kind of many sub-layers, as the kernel gave them."""

    names: list[_Name]
    """Of the sub-layers of the graph."""
    indices: Sequence[int]
    """Which of them each row is of."""
    seen: NDArray[np.bool_]
    """Whether there is anything in a row."""
    rows: NDArray[np.float64]

    def block(self, places: Mapping[_Name, int]) -> Block:
        """The rows of those that an axis has, in its order."""
        sites = np.array([places.get(self.names[index], -1) for index in self.indices], np.intp)
        kept = self.seen & (sites >= 0)
        if kept.all() and (np.diff(sites) > 0).all():
            return Block(sites, self.rows)
        order = np.flatnonzero(kept)[np.argsort(sites[kept])]
        return Block(sites[order], self.rows[order])


class ResidualHooks:
    """Measures residual sub-layers of one model.

    Args:
        modules: modules by path, to find the norm on a sum.
        probes: all probes of the watch; those of other axes are ignored.
    """

    def __init__(self, modules: Mapping[str, nn.Module], probes: Sequence[Probe]) -> None:
        self.probes = tuple(probe for probe in probes if probe.tap.axis is Axis.SUBLAYER)
        self.every: Callable[[Probe], bool] = _always
        """Whether a probe records on this step."""
        self._found: dict[_Name, list[TermSlots]] = {}
        self._rows: dict[_Key, _Rows] = {}
        self._summed: list[_Key] = []
        """Terms of gradients of which the kernel takes the sums."""
        self._modules = modules
        self._no_norm, self._unknown_norm = nn.Identity(), nn.Module()
        self._names: list[_Name] = []
        self._owners: list[nn.Module] = []
        self._places: Places | None = None
        self._routes: Routes | None = None
        self._flow: PathFlow | None = None
        self._said: set[str] = set()
        self._all_seen = np.ones(0, np.bool_)
        self._dues: dict[Tap, tuple[Callable[[Probe], bool], _Due]] = {}
        """What was due of a tap when it was last asked, and by what it is told."""
        self._known_names: tuple[Topology, dict[_Name, int]] | None = None

    def begin(self) -> None:
        """Start a step."""
        self.end()
        self._found, self._rows, self._summed = {}, {}, []

    @property
    def is_due(self) -> bool:
        """Whether a probe looks at sub-layers on this step."""
        return any(self.every(probe) for probe in self.probes)

    def observe(self, topology: Topology, live: LiveGraph, board: Board) -> None:
        """Measure the sums, and get ready for the gradients.

        Args:
            topology: the sub-layers.
            live: the same in the graph of this step, before its backward pass.
            board: where terms go.
        """
        if live.places is not self._places:
            self._plan(topology, live)
        due = self._due(Tap.RESIDUAL_SUM)
        if due:
            found = list(live.operands())
            indices, met = [sublayer.index for sublayer, _ in found], [operands for _, operands in found]
            for task in due:
                for place in self._left(task, indices, met):
                    plain = tuple(tensor.detach() for tensor in met[place])
                    self._measure([task], indices[place], plain, board)
        due = self._due(Tap.RESIDUAL_GRADIENTS)
        if self._routes is not None and due:
            sums = not self._rows.keys() & _keys(due) and all(map(_is_summed, due))
            self._summed = _keys(due) if sums else []
            self._flow = PathFlow(live, self._reporter(due, board), self._routes, sums=sums)
            self._flow.attach()

    def _left(self, task: _Task, indices: Sequence[int], met: Sequence[Operands]) -> Sequence[int]:
        """Have a probe measure many sub-layers in one call, if it can; the places of those that it has not measured."""
        probe, wanted = task
        together = probe.together if isinstance(probe, TensorProbe) and len(wanted) == 1 else None
        if together is None or not met or wanted[0][0] in self._rows:
            return range(len(met))
        try:
            measured = together(met, [self._owners[index] for index in indices])
        except Exception as error:  # one probe's fault costs the others nothing
            warn_once(self, error, probe.name)
            return ()
        if measured is None:
            return range(len(met))
        rows, left = measured
        if len(self._all_seen) != len(met):
            self._all_seen = np.ones(len(met), np.bool_)
        seen = self._all_seen
        if left:
            seen = seen.copy()
            seen[list(left)] = False
        self._rows[wanted[0][0]] = _Rows(self._names, indices, seen, rows)
        return left

    def _plan(self, topology: Topology, live: LiveGraph) -> None:
        """Get ready for graphs of another shape."""
        self._names = _names(topology)
        self._owners = [self._norm(sublayer.norm_after) for sublayer in topology.sublayers]
        follows = any(probe.tap is Tap.RESIDUAL_GRADIENTS for probe in self.probes)
        if follows and live.graph is not None:
            live.places.worked_out[_ROUTES] = Routes(live.graph, live.places)
        self._routes = cast("Routes | None", live.places.worked_out.get(_ROUTES))
        self._places = live.places

    def end(self) -> None:
        """Take the hooks off the graph."""
        flow, self._flow = self._flow, None
        if flow is None:
            return
        self._take(flow)
        flow.detach()
        for reason in flow.obstacles:
            if reason not in self._said:
                self._said.add(reason)
                text = f"shortcut_only_gradient is not known below the place where {reason}."
                warnings.warn(text, CoverageWarning, stacklevel=2)

    def _take(self, flow: PathFlow) -> None:
        """What the kernel has summed of gradients."""
        taken = flow.taken() if self._summed else None
        if taken is not None:
            indices = [sublayer.index for sublayer in flow.sublayers]
            self._rows |= dict.fromkeys(self._summed, _Rows(self._names, indices, *taken))

    def blocks(self, topology: Topology | None) -> Blocks:
        """What the kernel measured on this step, before what `along` gives.

        Args:
            topology: the one that the axis is made of.

        Returns:
            How to ask for it.
        """
        self.end()
        if topology is None or not self._rows:
            return no_blocks
        return partial(_block, self._rows, self._names_of(topology)[1])

    def only_blocks(self, topology: Topology | None, wanted: Iterable[_Key]) -> Blocks | None:
        """`blocks`, if the kernel measured all that is wanted on this step, and nobody else measured anything.

        Args:
            topology: the one that the axis is made of.
            wanted: names of probes, and terms.

        Returns:
            How to ask for it, or None.
        """
        blocks = self.blocks(topology)
        return blocks if not self._found and all(key in self._rows for key in wanted) else None

    def along(self, topology: Topology | None) -> dict[int, list[TermSlots]]:
        """What was measured on this step.

        Args:
            topology: the one that the axis is made of; sub-layers that it does not have are left out.

        Returns:
            Index of the sub-layer -> its observations.
        """
        places = {} if topology is None or not self._found else self._names_of(topology)[1]
        return {index: self._found[name] for name, index in places.items() if name in self._found}

    def _names_of(self, topology: Topology) -> tuple[Topology, dict[_Name, int]]:
        """Places by name."""
        known = self._known_names
        if known is None or known[0] is not topology:
            known = self._known_names = (topology, {name: index for index, name in enumerate(_names(topology))})
        return known

    def _norm(self, path: str | None) -> nn.Module:
        """The norm on a sum; an identity if there is none, an empty module for one that is no module."""
        return self._no_norm if path is None else self._modules.get(path, self._unknown_norm)

    def _reporter(self, due: _Due, board: Board) -> Callable[[int, PathGradients], None]:
        def report(index: int, gradients: PathGradients) -> None:
            found = tuple(gradient for gradient in gradients if gradient is not None)
            if len(found) < len(gradients):
                assert gradients.entering is not None
                empty = gradients.entering.new_empty(0)
                found = tuple(empty if gradient is None else gradient for gradient in gradients)
            self._measure(due, index, found, board)

        return report

    def _due(self, tap: Tap) -> _Due:
        """The probes that are due, each with its terms and their keys."""
        known = self._dues.get(tap)
        if known is None or known[0] != self.every:
            due = [probe for probe in self.probes if probe.tap is tap and self.every(probe)]
            tasks = [(probe, tuple(((probe.name, terms), terms) for terms in terms_of(probe))) for probe in due]
            known = self._dues[tap] = self.every, tasks
        return known[1]

    def _measure(self, due: _Due, index: int, tensors: Tensors, board: Board) -> None:
        slots: TermSlots = {}
        for probe, wanted in due:
            try:
                view: Tensors | None = probe.view(tensors, self._owners[index])
                if view is not None:
                    for key, terms in wanted:
                        slots[key] = board.put(terms, view)
            except Exception as error:  # one probe's fault costs the others nothing
                warn_once(self, error, probe.name)
        self._found.setdefault(self._names[index], []).append(slots)


def _block(measured: Mapping[_Key, _Rows], places: Mapping[_Name, int], probe: Probe, terms: Terms) -> Block | None:
    found = measured.get((probe.name, terms))
    return None if found is None else found.block(places)


def _names(topology: Topology) -> list[_Name]:
    """Names that stay the same from step to step: a module, and how many sub-layers before had it too."""
    seen: dict[str, int] = {}
    names = []
    for sublayer in topology.sublayers:
        path = sublayer.branch or sublayer.site or ""
        names.append((path, seen.get(path, 0)))
        seen[path] = seen.get(path, 0) + 1
    return names


def _keys(due: _Due) -> list[_Key]:
    return [key for _, wanted in due for key, _ in wanted]


def _is_summed(task: _Task) -> bool:
    """Whether the kernel can take all that a probe wants of gradients."""
    return sees_everything(task[0]) and all(terms.packs is kernel_residuals.residual_gradients for _, terms in task[1])


def _always(_: Probe) -> bool:
    return True
