"""What `describe` and `labelled` need of a run, so that they do not need to know `reader.Run`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keelscope.store.history import History
from keelscope.store.schema import CoverageEntry, GroupSpec, RunInfo
from keelscope.store.series import Series

__all__ = ["ShownRun"]


class ShownRun(Protocol):
    """A run as it can be shown and labelled."""

    path: Path | None
    groups: Mapping[str, GroupSpec]

    @property
    def info(self) -> RunInfo:
        """What is known about the run as a whole."""

    @property
    def coverage(self) -> tuple[CoverageEntry, ...]:
        """What was observed, what was not, and why."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalar series."""

    @property
    def history(self) -> History:
        """Its sessions and what there is to say about them."""

    @property
    def live(self) -> bool:
        """Whether the run is being written."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """Recorded steps, ``[step]``."""

    def observed(self, group: str) -> NDArray[np.bool_]:
        """Which sites were seen, ``[step, site]``."""

    def __getitem__(self, key: str) -> Series: ...
