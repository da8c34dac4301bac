"""`RunSource`: what a `reader.Run` needs of whatever holds its numbers: a file, several, memory, or another process."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keelscope.store.history import History
from keelscope.store.names import ALL
from keelscope.store.overview import Overview
from keelscope.store.schema import RunLayout

__all__ = ["RunSource"]


class RunSource(Protocol):
    """Where a `Run` gets its numbers from."""

    @property
    def layout(self) -> RunLayout:
        """What is recorded."""

    @property
    def live(self) -> bool:
        """Whether more rows may come."""

    @property
    def stopped(self) -> bool:
        """Whether the writer ended without closing it."""

    @property
    def history(self) -> History:
        """Sessions, missing ranks, and what could not be read."""

    def steps(self, group: str) -> NDArray[np.int64]:
        """Recorded steps of a group (or of the scalars), ``[step]``, as of the last refresh."""

    def read(self, group: str, name: str, start: int, stop: int, sites: slice = ALL) -> NDArray[np.float64]:
        """Rows ``start:stop`` of a statistic, of some sites, or of a scalar, ``[step, ...]``."""

    def observed(self, group: str, start: int, stop: int, sites: slice = ALL, name: str = "") -> NDArray[np.bool_]:
        """Rows ``start:stop`` of which sites were seen, ``[step, site]``; of a statistic, where its value is known."""

    def overview(self, group: str, name: str, factor: int, sites: slice = ALL) -> Overview | None:
        """A statistic in fewer rows, if there is such an overview ready made."""

    def refresh(self) -> bool:
        """Look for new rows; True if there are any."""

    def close(self) -> None:
        """Give back what is held open."""
