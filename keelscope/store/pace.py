"""`Pace`: when rows are committed, when a new part is begun, how long anything may wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keelscope.errors import UsageError

__all__ = ["Pace"]

_CHOICES = {
    "fsync": ("close", "commit"),
    "live": ("swmr", "parts"),
    "seal": ("exact", "float32", "10bit", "never"),
}


@dataclass(frozen=True, slots=True)
class Pace:
    """How a run file is written; times in seconds.

    Raises:
        UsageError: if a value cannot be used.

    Example:
        >>> Pace(fsync="commit", live="parts").part_time
        1800.0
    """

    batch: int = 64
    """Rows after which they are committed."""
    delay: float = 1.0
    """How long a row waits at most before it is committed."""
    capacity: int = 256
    """Rows that may wait for the disk."""
    patience: float = 1.0
    """How long training waits for room in the queue, once per stall, before rows are dropped."""
    retry: float = 60.0
    """When to try again after the disk was full or gone."""
    heartbeat: float = 10.0
    """How often ``status`` is renewed when there is nothing to write."""
    part_rows: int = 4096
    """Rows after which a new part is begun."""
    part_time: float = 1800.0
    """Age at which a new part is begun."""
    changes: int = 16
    """How often something new (a scalar that was never logged before) may begin a part."""
    fsync: Literal["close", "commit"] = "close"
    """When to wait until the disk itself has the rows: when a part is closed, or after every commit."""
    live: Literal["swmr", "parts"] = "swmr"
    """``"swmr"``: every committed row can be read at once. ``"parts"``, for network file systems: parts are written on
    the local disk and appear when they are complete."""

    seal: Literal["exact", "float32", "10bit", "never"] = "exact"
    """What becomes of a closed run: its parts are merged into one compressed file that keeps every bit, the 24 bits of
    float32, or a relative error of 2^-11; ``"never"`` leaves them as they are."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}= takes {' or '.join(map(repr, choices))}; got {getattr(self, name)!r}.")
        if min(self.batch, self.capacity, self.part_rows) < 1:
            raise UsageError("batch=, capacity= and part_rows= take 1 or more.")
