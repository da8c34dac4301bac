"""What rows with the same probes have in common, worked out at the first of them.

Most rows hold what the kernel saw and nothing else: `Agenda.close` makes one of its page and its arrays, without
a look at every probe. The rest is the business of `keelscope.assembly`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from keelscope.calls import terms_of
from keelscope.pages import Sheet, dense_block, no_blocks
from keelscope.probe import Axis, Probe, Tap
from keelscope.rows import RowValues
from keelscope.waiting import Frame, WaitingGroup

if TYPE_CHECKING:
    from keelscope.calls import StepRecord
    from keelscope.residuals import ResidualHooks
    from keelscope.statistics import Terms
    from keelscope.topology import Topology

    _Beside = tuple[ResidualHooks, Topology | None]

__all__ = ["Agenda", "Agendas"]


class Agenda:
    """The probes that record on a step.

    Args:
        probes: those.
    """

    def __init__(self, probes: Iterable[Probe]) -> None:
        chosen = tuple(probes)
        self._names = frozenset(probe.name for probe in chosen)
        self.has_sublayers = any(probe.tap.axis is Axis.SUBLAYER for probe in chosen)
        """Whether one of them looks at residual sub-layers."""
        self._frames: list[tuple[str, Frame, tuple[float, ...], Axis]] | None = None
        self._needs: tuple[tuple[Tap, str, Terms], ...] = ()
        self._needs_beside: tuple[tuple[str, Terms], ...] = ()
        self._needs_page = False

    def every(self, probe: Probe) -> bool:
        """Whether a probe records."""
        return probe.name in self._names

    def learn(self, row: RowValues) -> None:
        """A row that is closed: if all its groups wait, others will be like it.

        Args:
            row: of a step with one process and no calls to keep.
        """
        if row.values or self._frames is not None:
            return
        frames = [(name, group.frame) for name, group in row.later.items()]
        probes = [probe for _, frame in frames for probe in frame.probes]
        needs = [(probe.tap, probe.name, terms) for probe in probes for terms in terms_of(probe)]
        self._needs = tuple(need for need in needs if need[0].axis is Axis.PARAMETER)
        self._needs_beside = tuple(need[1:] for need in needs if need[0].axis is Axis.SUBLAYER)
        self._needs_page = any(probe.tap.of_module for probe in probes)
        self._frames = [(n, f, (1.0,) * len(f.probes), f.probes[0].tap.axis) for n, f in frames]

    def close(self, step: StepRecord, sheet: Sheet, beside: _Beside) -> RowValues | None:
        """The row of a step, if the kernel saw everything of it.

        Args:
            step: the step, whose gradients are those of the loss itself.
            sheet: what its page has taken.
            beside: what observes residual sub-layers, and these.

        Returns:
            What `keelscope.assembly.ClosingRow` would make of it, or None.
        """
        if self._frames is None or step.calls or step.arrivals or step.beside or step.parameters:
            return None
        if (self._needs_page and not sheet.seen) or not all([key in step.dense for key in self._needs]):  # noqa: C419
            return None
        residuals, topology = beside
        measured = residuals.only_blocks(topology, self._needs_beside) if self._needs_beside else no_blocks
        if measured is None:
            return None
        seen = {Axis.MODULE: sheet.block, Axis.PARAMETER: dense_block(step.dense), Axis.SUBLAYER: measured}
        later = {name: WaitingGroup(frame, seen[axis], factors) for name, frame, factors, axis in self._frames}
        return RowValues({}, {}, later)


class Agendas:
    """The agendas of a watch, by what is due.

    Args:
        probes: all probes.
    """

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._probes = probes
        self._known: dict[tuple[bool, ...], Agenda] = {}

    def at(self, recorded: int) -> Agenda:
        """What is due on the row after so many.

        Args:
            recorded: how many rows there are.

        Returns:
            The agenda, the same for the same probes.
        """
        due = tuple([recorded % probe.every == 0 for probe in self._probes])
        agenda = self._known.get(due)
        if agenda is None:
            chosen = (probe for probe, is_due in zip(self._probes, due, strict=True) if is_due)
            agenda = self._known[due] = Agenda(chosen)
        return agenda
