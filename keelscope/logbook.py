"""Numbers that the user logs: looked at, and handed to the journal with the step that they belong to."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

from keelscope.arming import Arming
from keelscope.errors import RecordingWarning, UsageError
from keelscope.journal import Journal, as_number
from keelscope.steps import ScalarPlaces
from keelscope.store.names import LOGGED_NAN

__all__ = ["Logbook"]


class Logbook:
    """Takes what `Watch.log` is given.

    Args:
        journal: where numbers go.
        arming: looks at them too.
        first: number of steps completed before the watch.
    """

    def __init__(self, journal: Journal, arming: Arming, first: int) -> None:
        self._journal, self._arming = journal, arming
        self._places = ScalarPlaces(first)
        self._left_out: set[str] = set()
        self._numbers: set[str] = set()

    def take(self, scalars: Mapping[str, object], completed: int, begun: bool | None) -> bool:
        """Store numbers; what cannot be stored is left out with one warning per name.

        Args:
            scalars: name -> what the user gave.
            completed: number of completed steps.
            begun: whether the running step has had a forward; None where that is not seen.

        Returns:
            Whether one of the step before is a reason to record the step that comes.
        """
        rang = False
        for name, value in scalars.items():
            try:
                number = as_number(name, value)
            except UsageError as error:
                self.leave_out(name, str(error))
                continue
            step = self._places.of(name, completed, begun)
            if self._journal.takes(name):  # where it does not, the journal has said so
                self._journal.log(step, {name: number} | self._mark(name, number))
            rang |= self._arming.see(step, name, number) and step < completed
        return rang

    def _mark(self, name: str, number: float) -> dict[str, float]:
        """What tells a NaN from nothing logged, as long as no number of that name has come."""
        if not math.isnan(number):
            self._numbers.add(name)
        return {} if name in self._numbers else {f"{LOGGED_NAN}{name}": 1.0}

    def refuse(self, names: Mapping[str, object]) -> None:
        """Say of each name, once, that the watch is closed."""
        for name in names:
            self.leave_out(name, f"log({name}=...) is not recorded: the watch is closed.")

    def leave_out(self, name: str, why: str) -> None:
        """Say, once for each name, that something is not recorded."""
        if name not in self._left_out:
            self._left_out.add(name)
            warnings.warn(why, RecordingWarning, stacklevel=4)
