"""What the kernel saw of one step, as arrays: calls of modules (`Page`), and parameters all together.

`keelscope.rows` joins it with what Python saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keelscope.calls import Dense, StepRecord
from keelscope.kernel import COLUMNS
from keelscope.probe import Probe, Tap
from keelscope.statistics import Terms

__all__ = ["Block", "Blocks", "Sheet", "dense_block", "no_blocks"]

_CALLED, _ARRIVED = 1, 2
_HALF = 11
_COLUMNS = {
    (routine, of_output): columns if of_output else slice(columns.start + _HALF, columns.stop + _HALF)
    for routine, columns in COLUMNS.items()
    for of_output in (True, False)
}


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Terms of one kind at the sites where there are any."""

    sites: NDArray[np.intp]
    """``[row]``, rising."""
    rows: NDArray[np.float64]
    """``[row, column]``."""


Blocks = Callable[[Probe, Terms], Block | None]
"""What the kernel saw for the terms of a probe: the first observation of each of its sites."""


def no_blocks(_: Probe, __: Terms) -> Block | None:
    """Of steps without the kernel."""
    return None


def dense_block(dense: Mapping[tuple[Tap, str, Terms], Dense]) -> Blocks:
    """What the kernel read of parameters.

    Args:
        dense: of the step.

    Returns:
        How to ask for it.
    """

    def block(probe: Probe, terms: Terms) -> Block | None:
        found = dense.get((probe.tap, probe.name, terms))
        if found is None:
            return None
        (sites,) = found.seen.nonzero()
        return Block(sites, found.rows if len(sites) == len(found.rows) else found.rows[sites])

    return block


class Sheet:
    """What a page has taken.

    Args:
        step: whose page it is.
        watches: which sites a probe looks at, ``[site]``.
    """

    def __init__(self, step: StepRecord, watches: Callable[[Probe], NDArray[np.bool_]]) -> None:
        self.seen, self._terms = step.page.take() if step.page is not None else (b"", b"")
        """What the kernel says of each site."""
        self._watches = watches

    @property
    def called(self) -> NDArray[np.bool_]:
        """``[site]``."""
        return _holds(self.seen, _CALLED)

    @property
    def reached(self) -> NDArray[np.bool_]:
        """``[site]``: whether a gradient is there."""
        return _holds(self.seen, _ARRIVED)

    @property
    def is_filled(self) -> bool:
        """Whether there was a page."""
        return bool(self.seen)

    def block(self, probe: Probe, terms: Terms) -> Block | None:
        """Terms of a probe of outputs or of their gradients; None of every other kind."""
        of_output = probe.tap is Tap.OUTPUT
        if terms.routine is None or not self.seen or not (of_output or probe.tap is Tap.OUTPUT_GRADIENT):
            return None
        columns = _COLUMNS[terms.routine, of_output]
        seen = self.called if of_output else self.reached
        (sites,) = (seen & self._watches(probe)[: len(seen)]).nonzero()
        rows = np.frombuffer(self._terms).reshape(len(seen), 2 * _HALF)  # [site, column]
        return Block(sites, rows[sites, columns])


def _holds(states: bytes, flag: int) -> NDArray[np.bool_]:
    """``[site]``."""
    found: NDArray[np.bool_] = (np.frombuffer(states, dtype=np.uint8) & flag) != 0
    return found
