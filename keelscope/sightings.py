"""What the steps of a recording have shown so far of each module and parameter.

`keelscope.recorder` notes every closed row; `keelscope.coverage` makes the table of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keelscope.calls import StepRecord
from keelscope.coverage import Seen
from keelscope.identities import Identities
from keelscope.pages import Sheet
from keelscope.sites import SitePlan
from keelscope.taps import Tap

__all__ = ["Sightings"]


@dataclass(slots=True)
class Sightings:
    """Identities of what was seen."""

    called: Identities = field(default_factory=Identities)
    """Modules with a recorded call."""
    with_gradient: Identities = field(default_factory=Identities)
    """Modules whose output received a gradient."""
    parameters: Identities = field(default_factory=Identities)
    """Parameters that received a gradient."""
    trainable: Identities = field(default_factory=Identities)
    """Parameters that required a gradient while a step ran."""
    _found: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    """What arrays of the kernel have shown already."""
    _last: tuple[object, ...] = ()
    """The step before, where the kernel saw all of it."""

    def note_like(
        self, plan: SitePlan, step: StepRecord, sheet: Sheet, trainable: Callable[[], Iterable[int]], changes: Hashable
    ) -> None:
        """`note`, which most steps pass by: they show what the one before did.

        Args:
            plan: the sites.
            step: what it showed.
            sheet: what the kernel saw of its calls.
            trainable: tells the identity of the parameters that required a gradient on it.
            changes: another one whenever the plan or `trainable` is another.
        """
        seen = [bytes(dense.flags) for key, dense in step.dense.items() if key[0] is Tap.PARAMETER_GRADIENT]
        now = () if step.calls or step.arrivals or step.parameters else (changes, sheet.seen, *seen)
        if not now or now != self._last:
            self._last = now
            self.note(plan, step, sheet, trainable())

    def note(self, plan: SitePlan, step: StepRecord, sheet: Sheet, trainable: Iterable[int] = ()) -> None:
        """Take in a step.

        Args:
            plan: the sites.
            step: what it showed.
            sheet: what the kernel saw of its calls.
            trainable: identity of the parameters that required a gradient on it.
        """
        self.trainable.update(trainable)
        self.called.update(id(plan.modules[site].module) for site in self._fresh("called", sheet.called))
        self.with_gradient.update(id(plan.modules[site].module) for site in self._fresh("reached", sheet.reached))
        self.with_gradient.update(id(plan.modules[site].module) for site in step.arrivals)
        fresh = [call for call in step.calls if id(plan.modules[call.site].module) not in self.with_gradient]
        self.called.update(id(plan.modules[call.site].module) for call in fresh)
        self.with_gradient.update(id(plan.modules[call.site].module) for call in fresh if call.first_gradient())
        reached = (i for i, record in step.parameters.items() if record.gradient())
        self.parameters.update(id(plan.parameters[i].parameter) for i in reached)
        for (tap, *_), dense in step.dense.items():
            if tap is Tap.PARAMETER_GRADIENT:
                seen = self._fresh("parameters", dense.seen)
                self.parameters.update(id(plan.parameters[i].parameter) for i in seen)

    def _fresh(self, which: str, found: NDArray[np.bool_]) -> list[int]:
        """Sites that were not found on an earlier step."""
        before = self._found.get(which)
        if before is None or len(before) != len(found):
            before = self._found[which] = np.zeros_like(found)
        fresh: list[int] = np.flatnonzero(found > before).tolist()
        if fresh:
            before |= found
        return fresh

    def with_open(self, plan: SitePlan, step: StepRecord, sheet: Sheet, trainable: Iterable[int] = ()) -> Sightings:
        """What will have been noted once the open step is closed.

        Args:
            plan: the sites.
            step: what it has shown so far.
            sheet: what the kernel saw of its calls so far.
            trainable: identity of the parameters that require a gradient on it.

        Returns:
            A copy; itself before any gradient has arrived.
        """
        if not step.saw_backward:
            return self
        called, arrived = Identities(self.called), Identities(self.with_gradient)
        later = Sightings(called, arrived, Identities(self.parameters), Identities(self.trainable))
        later.note(plan, step, sheet, trainable)
        return later

    def seen(
        self,
        plan: SitePlan,
        taps: Iterable[Tap],
        lost: Mapping[int, str],
        refused: Mapping[int, str],
        unsummed: Iterable[int] = (),
    ) -> Seen:
        """Everything noted, for the coverage.

        Args:
            plan: the sites.
            taps: what the probes look at.
            lost: site -> why its calls could not be observed.
            refused: site -> what of it is missing, and why.
            unsummed: parameters whose gradient is a sum that the ranks had not added up.

        Returns:
            The record.
        """
        looked = set(taps)
        return Seen(  # asked twice for every module and parameter: of sets, which are faster
            frozenset(self.called),
            frozenset(self.with_gradient) if any(tap.in_backward for tap in looked) else None,
            frozenset(self.parameters) if Tap.PARAMETER_GRADIENT in looked else None,
            {id(plan.modules[i].module): why for i, why in lost.items()},
            backward=bool(self.with_gradient or self.parameters),
            partly={id(plan.modules[i].module): why for i, why in refused.items()},
            unsummed={id(plan.parameters[i].parameter) for i in unsummed},
            trainable=frozenset(self.trainable) if Tap.PARAMETER_GRADIENT in looked and self.trainable else None,
        )
