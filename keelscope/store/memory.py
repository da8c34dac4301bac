"""`MemoryWriter`: records a run into memory, with the same checks and the same `Run` as a file.

Used where no path is given: `keelscope.report` on a model, tests, short looks in a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keelscope.errors import UsageError
from keelscope.store.covered import Seen, covered, seen_by
from keelscope.store.history import History
from keelscope.store.layout import check_wider, row_shape
from keelscope.store.names import ALL, OBSERVED, WALL_TIME
from keelscope.store.overview import Overview
from keelscope.store.pace import Pace
from keelscope.store.reader import Run
from keelscope.store.rows import PackedRow, RowPacker, settle
from keelscope.store.schema import SCALARS, CoverageEntry, Row, RunLayout

__all__ = ["MemoryWriter"]


class MemoryWriter:
    """Keeps rows in memory.

    Args:
        layout: everything that will be recorded.

    Raises:
        UsageError: if the layout cannot be stored.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._packer = RowPacker(layout)
        self._table = _Table(self._packer.layout)
        self._changes = 0

    def append(self, row: Row) -> None:
        """Record a row, which is copied.

        Args:
            row: one recorded step, after the step of the row before it.

        Raises:
            UsageError: if it does not fit the layout or the writer is closed.
        """
        if not self._table.live:
            raise UsageError("This recording is closed; no more rows can be added.")
        self._table.add(*settle([self._packer.pack(row)]))

    def change(self, layout: RunLayout) -> bool:
        """From the next row on, record more; the rows so far hold NaN there.

        Args:
            layout: everything there was, in the same places, and something new.

        Returns:
            False if that was done as often as a run file allows; then nothing changes.

        Raises:
            UsageError: if something that was recorded is missing, or the layout cannot be stored.
        """
        packer = RowPacker(layout, self._packer.last)
        check_wider(self._packer.layout, packer.layout)
        if self._changes >= Pace().changes:
            return False
        self._changes += 1
        self._packer = packer
        self._table.widen(packer.layout)
        return True

    def cover(self, entries: Sequence[CoverageEntry]) -> None:
        """Say what all rows have shown.

        Args:
            entries: the coverage by now. What it calls observed is so in the run, too.
        """
        self._table.cover(seen_by(entries))

    def flush(self) -> None:
        """Nothing to wait for: a row can be read as soon as `append` returns and the run is refreshed."""

    def close(self) -> None:
        """Accept no more rows. Harmless when repeated."""
        self._table.live = False

    def run(self) -> Run:
        """The run recorded so far.

        Returns:
            A `Run`; its `refresh` shows rows appended later.
        """
        return Run(_MemorySource(self._table))


class _Table:
    """All columns of a run, growing together."""

    def __init__(self, layout: RunLayout) -> None:
        self.live = True
        self.steps: dict[str, _Column] = {}
        self.columns: dict[tuple[str, str], _Column] = {}
        self.widen(layout)

    def widen(self, layout: RunLayout) -> None:
        self.layout = layout
        for group in (SCALARS, *(spec.name for spec in layout.groups)):
            self.steps.setdefault(group, _Column(np.int64))
        for name in (WALL_TIME, *layout.scalars):
            self._column(SCALARS, name, np.float64, ())
        for spec in layout.groups:
            self._column(spec.name, OBSERVED, np.uint8, (len(spec.sites),))
            for statistic in spec.statistics:
                self._column(spec.name, statistic.name, np.float64, row_shape(spec, statistic))

    def cover(self, seen: Seen) -> None:
        self.layout = replace(self.layout, coverage=covered(self.layout.coverage, seen))

    def _column(self, group: str, name: str, dtype: type[np.generic], row: tuple[int, ...]) -> None:
        before = self.columns.get((group, name))
        if before is None or before.row != row:
            self.columns[group, name] = _Column(dtype, row, before, self.steps[group].size)

    def add(self, row: PackedRow) -> None:
        for group, values in row.groups.items():
            for name, value in values.items():
                self.columns[group, name].append(value)
            self.steps[group].append(row.step)
        scalars: dict[str, float | None] = dict(zip(self.layout.scalars, row.scalars, strict=True))
        for name, scalar in ({WALL_TIME: row.wall_time} | scalars).items():
            self.columns[SCALARS, name].append(math.nan if scalar is None else scalar)
        self.steps[SCALARS].append(row.step)


class _Column:
    """An array that grows along its first axis by doubling."""

    def __init__(
        self, dtype: type[np.generic], row: tuple[int, ...] = (), before: _Column | None = None, size: int = 0
    ) -> None:
        self.row, self.size = row, size
        self._data = np.full((max(4, size), *row), np.nan if dtype is np.float64 else 0, dtype)
        if before is not None:
            self._data[:size, : before.row[0]] = before.rows(0, size)

    def append(self, value: ArrayLike) -> None:
        if self.size == len(self._data):
            self._data = np.concatenate([self._data, np.empty_like(self._data)])
        self._data[self.size] = value
        self.size += 1

    def rows(self, start: int, stop: int) -> NDArray[np.generic]:
        return self._data[start:stop]


class _MemorySource:
    """A `RunSource` on a table, which shows the rows there were at the last refresh."""

    def __init__(self, table: _Table) -> None:
        self._table = table
        self._sizes: dict[str, int] = {}
        self.live = table.live
        self.stopped = False  # its writer is this process
        self.history = History(problems=_alone(table.layout))
        self.refresh()

    def steps(self, group: str) -> NDArray[np.int64]:
        return self._table.steps[group].rows(0, self._sizes[group]).astype(np.int64)

    def read(self, group: str, name: str, start: int, stop: int, sites: slice = ALL) -> NDArray[np.float64]:
        rows = self._table.columns[group, name].rows(start, stop)
        return (rows[:, sites] if rows.ndim > 1 else rows).astype(np.float64)

    def observed(self, group: str, start: int, stop: int, sites: slice = ALL, name: str = "") -> NDArray[np.bool_]:
        del name  # every statistic of a row that one process recorded is known
        return self._table.columns[group, OBSERVED].rows(start, stop)[:, sites].astype(np.bool_)

    def overview(self, group: str, name: str, factor: int, sites: slice = ALL) -> Overview | None:
        """None is kept: what is in memory is read at once."""
        del group, name, factor, sites
        return None

    def refresh(self) -> bool:
        sizes = {group: column.size for group, column in self._table.steps.items()}
        grown = sizes != self._sizes
        self._sizes, self.live, self.layout = sizes, self._table.live, self._table.layout
        return grown

    def close(self) -> None:
        """Nothing is held open."""


def _alone(layout: RunLayout) -> tuple[str, ...]:
    """What to say of a run of several ranks of which this process knows its own part only."""
    part = layout.part
    if part.world_size == 1:
        return ()
    said = f"Kept in the memory of rank {part.rank} of {part.world_size}; what the other ranks saw is not in it"
    if any(group.provenance.get("reduce") == "shard" for group in layout.groups):
        said += ", and sizes and gradients of parameters are those of its shards"
    return (f"{said}.",)
