"""What probes of residual sub-layers see on one step: the operands of each sum, and the gradients around it.

`keelscope.recorder` hands over the live graph when the first gradient arrives; `keelscope.paths` splits the gradients.
One forward of a step is looked at, the first one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import nn

from keelscope.board import Board
from keelscope.calls import TermSlots, terms_of
from keelscope.containment import warn_once
from keelscope.errors import CoverageWarning
from keelscope.paths import PathFlow, PathGradients, Routes
from keelscope.probe import Axis, Probe, Tap, Tensors
from keelscope.statistics import Terms
from keelscope.topology import LiveGraph, Places, Topology

__all__ = ["ResidualHooks"]

_ROUTES = "routes of gradients"
_Name = tuple[str, int]
_Due = list[tuple[Probe, tuple[tuple[tuple[str, Terms], Terms], ...]]]


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
        self._modules = modules
        self._no_norm, self._unknown_norm = nn.Identity(), nn.Module()
        self._names: list[_Name] = []
        self._owners: list[nn.Module] = []
        self._places: Places | None = None
        self._routes: Routes | None = None
        self._flow: PathFlow | None = None
        self._said: set[str] = set()
        self._known_names: tuple[Topology, list[_Name]] | None = None

    def begin(self) -> None:
        """Start a step."""
        self.end()
        self._found = {}

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
        for sublayer, met in live.operands() if due else ():
            self._measure(due, sublayer.index, (met.stream, met.shortcut, met.branch), board)
        due = self._due(Tap.RESIDUAL_GRADIENTS)
        if self._routes is not None and due:
            self._flow = PathFlow(live, self._reporter(due, board), self._routes)
            self._flow.attach()

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
        flow.detach()
        for reason in flow.obstacles:
            if reason not in self._said:
                self._said.add(reason)
                text = f"shortcut_only_gradient is not known below the place where {reason}."
                warnings.warn(text, CoverageWarning, stacklevel=2)

    def along(self, topology: Topology | None) -> dict[int, list[TermSlots]]:
        """What was measured on this step.

        Args:
            topology: the one that the axis is made of; sub-layers that it does not have are left out.

        Returns:
            Index of the sub-layer -> its observations.
        """
        names = [] if topology is None else self._names_of(topology)
        return {index: self._found[name] for index, name in enumerate(names) if name in self._found}

    def _names_of(self, topology: Topology) -> list[_Name]:
        known = self._known_names
        if known is None or known[0] is not topology:
            known = self._known_names = (topology, _names(topology))
        return known[1]

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
        due = [probe for probe in self.probes if probe.tap is tap and self.every(probe)]
        return [(probe, tuple(((probe.name, terms), terms) for terms in terms_of(probe))) for probe in due]

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


def _names(topology: Topology) -> list[_Name]:
    """Names that stay the same from step to step: a module, and how many sub-layers before had it too."""
    seen: dict[str, int] = {}
    names = []
    for sublayer in topology.sublayers:
        path = sublayer.branch or sublayer.site or ""
        names.append((path, seen.get(path, 0)))
        seen[path] = seen.get(path, 0) + 1
    return names


def _always(_: Probe) -> bool:
    return True
