"""What a run says of steps that were recorded beside the schedule: how many, and because of what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import RunFileError
from keelscope.store.series import Series

__all__ = ["ARMED", "ARMED_BY", "armed_note", "armed_notes"]

ARMED = "armed"
"""The scalar that is 1 on such steps."""
ARMED_BY = "armed_by_"
"""What scalars begin with that say, at the step where it happened, how far a number was from its past."""
_MOST = 3

_Column = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Steps and values."""


def armed_notes(names: Iterable[str], read: Callable[[str], Series]) -> Iterator[str]:
    """`armed_note` of a run, where its scalars can be read.

    Args:
        names: its scalars.
        read: gives one of them.

    Yields:
        One sentence or none.
    """
    ours = [name for name in names if name == ARMED or name.startswith(ARMED_BY)]
    try:
        found = {name: read(name) for name in ours}
    except RunFileError:  # a damaged stretch is told by those who read it
        return
    note = armed_note({name: (series.steps, np.asarray(series.values)) for name, series in found.items()})
    if note:
        yield note


def armed_note(columns: Mapping[str, _Column]) -> str:
    """A sentence on the steps that were recorded because something happened.

    Args:
        columns: the scalars by name.

    Returns:
        The sentence; nothing where there were none.

    Example:
        >>> steps = np.arange(3)
        >>> armed, reason = np.array([0, 0, 1]), np.array([np.nan, np.inf, np.nan])
        >>> armed_note({"armed": (steps, armed), "armed_by_loss": (steps, reason)})
        '1 step was recorded beside the schedule, because of loss at step 1 (not finite).'
    """
    count = int(np.nansum(columns[ARMED][1] == 1)) if ARMED in columns else 0
    events = sorted(
        (int(step), name.removeprefix(ARMED_BY), float(value))
        for name, (steps, values) in columns.items()
        if name.startswith(ARMED_BY)
        for step, value in zip(steps[~np.isnan(values)], values[~np.isnan(values)], strict=True)
    )
    if not count or not events:
        return ""
    shown = [f"{name} at step {step} ({_size(value)})" for step, name, value in events[:_MOST]]
    more = [f"{len(events) - _MOST} more" if len(events) > _MOST else shown.pop()] if len(shown) > 1 else []
    told = " and ".join([", ".join(shown), *more])
    verb = "1 step was" if count == 1 else f"{count} steps were"
    return f"{verb} recorded beside the schedule, because of {told}."


def _size(value: float) -> str:
    return f"z = {value:.3g}" if math.isfinite(value) else "not finite"
