"""One row as it closes: what each due probe saw becomes values, or waits until the row is written.

`keelscope.recorder` decides when; `keelscope.rows` knows how values are made, `keelscope.waiting` what can wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.calls import terms_of
from keelscope.containment import warn_once
from keelscope.observed import observed
from keelscope.pages import Blocks, Sheet
from keelscope.probe import Axis, Probe, Tap, group_of
from keelscope.rows import Observations, RowValues, probe_extents, probe_values
from keelscope.store.names import TOTAL_NORM
from keelscope.waiting import Frame, WaitingGroup, may_wait

if TYPE_CHECKING:
    from keelscope.board import Fetched
    from keelscope.calls import StepRecord
    from keelscope.distributed import Ranks
    from keelscope.gates import GateHooks
    from keelscope.lossscale import LossScale
    from keelscope.residuals import ResidualHooks
    from keelscope.sites import SitePlan
    from keelscope.topology import Topology

__all__ = ["ClosingRow"]


@dataclass(frozen=True, slots=True, eq=False)
class ClosingRow:
    """What a step has shown, and what its values are expressed in."""

    step: StepRecord
    sheet: Sheet
    fetched: Fetched
    factor: float
    """What takes the loss scale out of gradients."""
    scale: LossScale
    ranks: Ranks
    plan: SitePlan
    beside: tuple[ResidualHooks, GateHooks, Topology | None]
    """What observes sites that are no modules, and the residual structure."""
    axes: Mapping[str, NDArray[np.intp]]
    """Group -> indices of its sites among all that there are."""
    extents: dict[str, dict[str, int]]
    """Group -> lengths of the axes that the first row decides."""
    is_first: bool

    def finish(self, due: Sequence[Probe], owner: object, *, at_once: bool) -> RowValues:
        """Values of the row.

        Args:
            due: the probes that record on this step.
            owner: keeps what was said of probes that fail.
            at_once: whether no group may wait until the row is written.

        Returns:
            The values.
        """
        later = {} if at_once or self.is_first or self.ranks.size > 1 else self._later(due)
        rest = [probe for probe in due if group_of(probe) not in later]
        row = RowValues({group_of(probe): {} for probe in rest}, {}, later)
        for probe in rest:
            try:
                found, seen = self._values(probe)
            except Exception as error:  # one probe's fault costs the others nothing
                warn_once(owner, error, probe.name)
                continue
            group, axis = group_of(probe), self.axes[group_of(probe)]
            row.values[group] |= {key: values[axis] for key, values in found.items()}
            if probe.tap.axis is Axis.PARAMETER:
                row.observed[group] = seen[axis] | row.observed.get(group, False)
        return row

    def _values(self, probe: Probe) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.bool_]]:
        observations, sites, blocks = self._observed(probe)
        lengths = self.extents.setdefault(group_of(probe), {})
        if self.is_first:
            for dim, length in probe_extents(probe, observations, self.fetched).items():
                lengths[dim] = max(length, lengths.get(dim, 1))
        factor = self._factor(probe)
        found, seen = probe_values(
            probe, observations, self.fetched, sites, factor=factor, extents=lengths, blocks=blocks
        )
        self.ranks.whole(probe, found, seen, self.beside[1].indices)
        return found, seen

    def _observed(self, probe: Probe) -> tuple[Observations, int, Blocks]:
        return observed(probe, self.step, self.sheet, self.plan, self.beside)

    def _factor(self, probe: Probe) -> float:
        unscaled = not probe.tap.of_gradient or (probe.tap is Tap.STEP_GRADIENT and not self.scale.in_step)
        return 1.0 if unscaled else self.factor * self.ranks.share(probe.tap)

    def _later(self, due: Iterable[Probe]) -> dict[str, WaitingGroup]:
        """Groups of which the kernel has seen everything on this step: they are finished with those of other rows."""
        by_group: dict[str, list[Probe]] = {}
        for probe in due:
            by_group.setdefault(group_of(probe), []).append(probe)
        found = {group: self._group(group, probes) for group, probes in by_group.items() if all(map(may_wait, probes))}
        return {group: waits for group, waits in found.items() if waits is not None}

    def _group(self, group: str, probes: Sequence[Probe]) -> WaitingGroup | None:
        if not all(self._is_with_kernel(probe) for probe in probes):
            return None
        looks = [(probe, *self._observed(probe)) for probe in probes]
        if any(observations for _, observations, _, _ in looks):
            return None
        _, _, sites, blocks = looks[0]  # all probes of a group look along the same axis
        total = TOTAL_NORM if any(map(_tells_total, probes)) else ""
        frame = Frame(tuple(probes), self.axes[group], sites, self.extents.get(group, {}).copy(), total)
        return WaitingGroup(frame, blocks, tuple(map(self._factor, probes)))

    def _is_with_kernel(self, probe: Probe) -> bool:
        """Whether the kernel has something for all terms of a probe."""
        if probe.tap in {Tap.OUTPUT, Tap.OUTPUT_GRADIENT}:
            return self.sheet.is_filled
        if probe.tap.axis is Axis.SUBLAYER:
            residuals, _, topology = self.beside
            return residuals.only_blocks(topology, [(probe.name, terms) for terms in terms_of(probe)]) is not None
        return all((probe.tap, probe.name, terms) in self.step.dense for terms in terms_of(probe))


def _tells_total(probe: Probe) -> bool:
    return probe.tap is Tap.PARAMETER_GRADIENT and any(statistic.name == "norm" for statistic in probe.statistics)
