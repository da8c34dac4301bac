"""`Drawn`: one panel of one run and what has been pooled of it; `Budget`: how many bytes all of them may hold together.

`keelscope_dashboards.followed` keeps what it has drawn, so that a run that grows is read on and not anew. What was not
looked at for longest is dropped first, whichever run it belongs to.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from keelscope_dashboards.depth import unfolded
from keelscope_dashboards.levels import LayerAxis, Levels, levels_of
from keelscope_dashboards.pooling import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from keelscope.store.reader import Run
    from keelscope_dashboards.panels import Panel

__all__ = ["BUDGET", "Budget", "Drawn", "drawn_of", "levels_between", "no_levels", "stacked"]

MAX_CELLS = 1 << 20
MAX_BINS = 1000
SLICE = 1 << 20  # cells read at once
BUDGET_BYTES = 256 << 20


@dataclass(slots=True, eq=False)
class Drawn:
    """One panel of one run: its layers and what has been pooled of it."""

    panel: Panel
    axis: LayerAxis
    pool: Pool
    sites: slice
    """The stretch of the site axis that its layers lie on."""
    width: int
    """Cells that one row of that stretch holds."""
    coarse: bool = False
    """Whether the pool is only a first look, in fewer bins than there is room for."""


class Budget:
    """Bytes of pooled series in memory, over all runs; the least recently used ones go first. Thread-safe.

    Args:
        limit: bytes; one series is kept however large it is.

    Example:
        >>> budget, first, second = Budget(100), {"a": 1}, {"b": 2}
        >>> budget.use(first, "a", 70)
        >>> budget.use(second, "b", 60)
        >>> first, second, budget.held
        ({}, {'b': 2}, 60)
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held: dict[tuple[int, str], tuple[dict[str, object], int]] = {}
        self._bytes = 0

    @property
    def held(self) -> int:
        """Bytes in use."""
        return self._bytes

    def use(self, shelf: dict[str, object], key: str, size: int) -> None:
        """Note that an entry of a shelf was used, and drop what is too much.

        Args:
            shelf: where the entry is kept; dropped entries are taken out of theirs.
            key: its key there.
            size: bytes it holds now.
        """
        with self._lock:
            self._drop((id(shelf), key))
            self._held[id(shelf), key] = (shelf, size)
            self._bytes += size
            while self._bytes > self._limit and len(self._held) > 1:
                oldest = next(iter(self._held))
                self._held[oldest][0].pop(oldest[1], None)
                self._drop(oldest)

    def forget(self, shelf: dict[str, object]) -> None:
        """Take everything off a shelf.

        Args:
            shelf: of a run that is closed.
        """
        with self._lock:
            for key in [key for key in self._held if key[0] == id(shelf)]:
                self._drop(key)
            shelf.clear()

    def _drop(self, key: tuple[int, str]) -> None:
        entry = self._held.pop(key, None)
        self._bytes -= entry[1] if entry is not None else 0


BUDGET = Budget(BUDGET_BYTES)
"""What all runs of this process share."""


def drawn_of(run: Run, panel: Panel, axis: LayerAxis, entry: int | None) -> Drawn:
    """An empty `Drawn`.

    Args:
        run: the run.
        panel: one that it holds.
        axis: the layers of that panel.
        entry: the only one of them that is wanted; all if None.

    Returns:
        Nothing pooled yet.
    """
    inner = _inner(run, panel)
    if entry is None:
        limit = min(MAX_BINS, MAX_CELLS // max(1, len(axis)))
        width = inner * len(run.groups[panel.group].sites)
        return Drawn(panel, axis, Pool(len(axis), limit), slice(None), max(1, width))
    members = axis.members[entry]
    first, last = (min(members) // inner, max(members) // inner + 1) if members else (0, 1)
    shifted = (tuple(member - first * inner for member in members),)
    only = replace(axis, labels=axis.labels[entry : entry + 1], types=axis.types[entry : entry + 1], members=shifted)
    alone = replace(only, depths=axis.depths[entry : entry + 1])
    return Drawn(panel, alone, Pool(1, MAX_BINS), slice(first, last), (last - first) * inner)


def _inner(run: Run, panel: Panel) -> int:
    """How many cells a site has in one row."""
    name = panel.key.partition("/")[2]
    spec = next((spec for spec in run.groups[panel.group].statistics if spec.name == name), None)
    size = 1
    for dim in spec.dims if spec is not None else ():
        size *= len(spec.coords.get(dim, ())) if spec is not None else 1
    return max(1, size)


def levels_between(run: Run, drawn: Drawn, start: int, stop: int | None) -> Iterator[Levels]:
    """Rows `start` to `stop` in bounded slices.

    Args:
        run: the run.
        drawn: which panel.
        start: first row.
        stop: row after the last; to the end if None.

    Yields:
        Levels of consecutive rows.
    """
    size = max(1, SLICE // drawn.width)
    while stop is None or start < stop:
        end = start + size if stop is None else min(stop, start + size)
        series = run.read(drawn.panel.key, start, end, sites=drawn.sites)
        if len(series.steps) == 0:
            return
        seen = run.observed(drawn.panel.key, start, end, sites=drawn.sites)
        if series.values.ndim > 2:
            values, seen = unfolded(series.values, seen)
            series = replace(series, values=values)
        linear = drawn.panel.scale == "linear"
        yield levels_of(series, drawn.axis, reference=drawn.panel.reference, observed=seen, linear=linear)
        start += len(series.steps)


def stacked(pieces: Sequence[Levels]) -> Levels:
    """Consecutive rows as one.

    Args:
        pieces: at least one.

    Returns:
        Levels of all their rows.
    """
    return Levels(
        np.concatenate([piece.decades for piece in pieces]),
        np.concatenate([piece.kinds for piece in pieces]),
        np.concatenate([piece.reference for piece in pieces]),
        np.concatenate([piece.steps for piece in pieces]),
    )


def no_levels(layers: int) -> Levels:
    """Levels without a row.

    Args:
        layers: length of the layer axis.

    Returns:
        Levels ``[0, layer]``.
    """
    empty = np.empty((0, layers))
    steps = np.empty(0, dtype=np.int64)
    return Levels(empty.astype(np.float32), empty.astype(np.uint8), np.empty(0, dtype=np.float32), steps)
