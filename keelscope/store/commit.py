"""Writes batches of rows into an open run file so that a reader, or a killed process, sees whole rows or none.

Order is the protocol: every data dataset is extended, written and flushed first, then each group's ``step``, which is
the commit marker, then ``status``. A batch that failed half way is written again at the same place. Called by `worker`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.store.covered import Seen, covered
from keelscope.store.names import COVERAGE, OBSERVED, SEEN_LATER, STATUS, STEP, WALL_TIME, dataset_names
from keelscope.store.rows import PackedRow
from keelscope.store.schema import SCALARS, RunLayout

__all__ = ["Committer", "State"]


class State(IntEnum):
    """First entry of ``status``."""

    LIVE = 0
    CLOSING = 1
    """The part is complete, the run goes on in the next one."""
    DONE = 2
    STOPPED = 3


class Committer:
    """The only object that writes to the file once SWMR has started.

    Args:
        file: the run file, in SWMR mode.
        layout: the layout it was created with.
    """

    def __init__(self, file: h5py.File, layout: RunLayout) -> None:
        self._status = file[STATUS]
        self._coverage = layout.coverage
        self._seen_later = file[COVERAGE][SEEN_LATER] if layout.coverage else None
        self._columns: dict[str, dict[str, h5py.Dataset]] = {
            group.name: {name: file[group.name][name] for name in (*(s.name for s in group.statistics), OBSERVED)}
            for group in layout.groups
        }
        self._scalars = [file[SCALARS][name] for name in dataset_names(layout.scalars).values()]
        self._wall_time = file[SCALARS][WALL_TIME]
        self._steps = {name: file[name][STEP] for name in (SCALARS, *self._columns)}
        self._datasets = {name: [*columns.values(), self._steps[name]] for name, columns in self._columns.items()}
        self._datasets[SCALARS] = [*self._scalars, self._wall_time, self._steps[SCALARS]]
        self._rows = dict.fromkeys(self._steps, 0)
        self._opened = [_opened(dataset) for datasets in self._datasets.values() for dataset in datasets]

    @property
    def rows(self) -> int:
        """Committed rows."""
        return self._rows[SCALARS]

    def growth(self, n_rows: int) -> int:
        """Bytes that the next batch may allocate at most.

        Args:
            n_rows: size of the batch.

        Returns:
            Bytes of the chunks it may open.
        """
        return sum(math.ceil(n_rows / rows + 1) * size for rows, size in self._opened)

    def commit(self, batch: Sequence[PackedRow]) -> None:
        """Write rows and mark them as committed.

        Args:
            batch: rows in step order. After a failure, the next call must begin with the same rows.

        Raises:
            OSError: if the disk is full or gone; nothing is marked as committed beyond what was.
        """
        steps = {name: [row.step for row in batch if name in row.groups] for name in self._columns}
        steps[SCALARS] = [row.step for row in batch]
        for name, columns in self._columns.items():
            rows = [row.groups[name] for row in batch if name in row.groups]
            self._append_columns(name, columns, rows)
        self._append_scalars(batch)
        for name, numbers in steps.items():
            if numbers:
                _append(self._steps[name], self._rows[name], np.array(numbers, dtype=np.int64))
        for name, numbers in steps.items():
            self._rows[name] += len(numbers)

    def trim(self) -> None:
        """Cut off what a failed commit has left beyond the committed rows, before the file is closed.

        Raises:
            OSError: if the disk is gone.
        """
        for name, datasets in self._datasets.items():
            for dataset in datasets:
                if dataset.id.shape[0] > self._rows[name]:
                    dataset.id.set_extent((self._rows[name], *dataset.id.shape[1:]))

    def report(self, state: State, dropped: int) -> None:
        """Rewrite ``status`` in place.

        Args:
            state: what the writer is doing.
            dropped: rows that were lost so far.
        """
        self._status[...] = [state, time.time(), self.rows, dropped]
        self._status.flush()

    def cover(self, seen: Seen) -> None:
        """Mark in place which modules and parameters were observed after the file was created.

        Args:
            seen: what all rows have observed.
        """
        after = covered(self._coverage, seen)
        if self._seen_later is not None and after != self._coverage:
            self._seen_later[...] = [was != now for was, now in zip(self._coverage, after, strict=True)]
            self._seen_later.flush()

    def _append_columns(
        self, name: str, columns: Mapping[str, h5py.Dataset], rows: Sequence[Mapping[str, NDArray[np.generic]]]
    ) -> None:
        if not rows:
            return
        for column, dataset in columns.items():
            _append(dataset, self._rows[name], np.stack([row[column] for row in rows]))

    def _append_scalars(self, batch: Sequence[PackedRow]) -> None:
        start = self._rows[SCALARS]
        _append(self._wall_time, start, np.array([row.wall_time for row in batch]))
        block = np.array([row.scalars for row in batch], dtype=np.float64)  # [row, scalar]
        for index, dataset in enumerate(self._scalars):
            _append(dataset, start, np.ascontiguousarray(block[:, index]))


def _append(dataset: h5py.Dataset, start: int, block: NDArray[np.generic]) -> None:
    """Extend, write, flush; through the low-level calls, which take half the time of slicing."""
    handle = dataset.id
    stop = start + len(block)
    if handle.shape[0] < stop:
        handle.set_extent((stop, *block.shape[1:]))
    place = handle.get_space()
    place.select_hyperslab((start, *(0 for _ in block.shape[1:])), block.shape)
    handle.write(h5py.h5s.create_simple(block.shape), place, block)
    handle.flush()


def _opened(dataset: h5py.Dataset) -> tuple[int, int]:
    """Rows that one chunk holds, and the bytes of all chunks over the other axes."""
    chunk = dataset.chunks
    tiles = math.prod(math.ceil(size / width) for size, width in zip(dataset.shape[1:], chunk[1:], strict=True))
    return chunk[0], int(tiles * math.prod(chunk) * dataset.dtype.itemsize)
