"""Terms of many small tensors at once, without the compiled kernel: outputs of modules, and their gradients.

Most of what numpy takes for a small tensor is spent before it reads the first entry, and between two modules of a model
every operation finds the caches full of something else. So entries are copied as they lie, into one buffer of fixed
size, and summed there all together. A large tensor is summed at once, where it lies and still is in the cache; what is
made of its sums waits for the others.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keelscope.hostsums import (
    Moments,
    Shape,
    host_late_tokens,
    host_moments_and_squares,
    host_squares,
    late_tokens_of,
    moments_of_rows,
    power_sums,
)
from keelscope.kernel import COLUMNS, Routine
from keelscope.onhost import Place, narrowed
from keelscope.rooms import BLOCK, LENGTH, Room

__all__ = ["WIDTH", "Batch"]

WIDTH = max(columns.stop for columns in COLUMNS.values())
"""Columns of a row of terms."""
_LONG = LENGTH  # entries above which copying costs more than it saves
_RUN = 4 * BLOCK  # entries of one run, and sums that wait
_BYTES = 64 * BLOCK
_MOMENTS, _SQUARES, _LATE_TOKENS = COLUMNS[Routine.MOMENTS], COLUMNS[Routine.SQUARES], COLUMNS[Routine.LATE_TOKENS]
_Table = NDArray[np.float64]
_BOTH = 1 << Routine.MOMENTS | 1 << Routine.LATE_TOKENS


@dataclass(slots=True, eq=False)
class _Run:
    """Tensors of one shape, one after the other in the buffer."""

    key: tuple[int, np.dtype[np.generic], int, Shape | None]
    """Number of entries, their type, routines and shape."""
    start: int
    table: NDArray[np.float64]
    """``[row, WIDTH]``, where terms go."""
    rows: list[int]


class Batch:
    """A buffer of entries that are still to be summed."""

    def __init__(self) -> None:
        self._moments: dict[int, tuple[_Table, list[int], list[Moments]]] = {}
        """Identity of a table -> it, rows of it, and what goes there."""
        self._tokens: dict[tuple[int, Shape], tuple[_Table, list[int], list[_Table]]] = {}
        """The same with the shape of tensors -> squares of the tokens of each."""
        self._waiting = 0
        self._runs: list[_Run] = []
        self._last: _Run | None = None
        self._used = 0
        self._lock = threading.Lock()  # autograd calls hooks from one thread per device

    @functools.cached_property
    def _raw(self) -> NDArray[np.uint8]:
        """The buffer; the compiled kernel needs none."""
        return np.empty(_BYTES, dtype=np.uint8)

    @functools.cached_property
    def _address(self) -> int:
        return self._raw.ctypes.data

    @functools.cached_property
    def _room(self) -> Room:
        return Room()

    def put(self, place: Place, routines: int, shape: Shape | None, table: NDArray[np.float64], row: int) -> None:
        """Take terms of a tensor, now or later.

        Args:
            place: where it lies.
            routines: a bit for each of `keelscope.kernel.COLUMNS`.
            shape: ``[batch, position, feature]`` of it, if it has these dimensions.
            table: ``[row, WIDTH]`` of zeros; holds the terms after `flush`.
            row: of the tensor.
        """
        address, count, dtype = place
        if not count:
            return
        with self._lock:
            if count > _LONG:
                self._take_long(place, routines, shape, table, row)
                return
            size = count * dtype.itemsize
            key, last = (count, dtype, routines, shape), self._last
            fits = last is not None and last.table is table and last.key == key and len(last.rows) < _RUN // count
            if not fits or self._used + size > _BYTES:
                last = self._new_run(size, _Run(key, 0, table, []))
            ctypes.memmove(self._address + self._used, address, size)
            self._used += size
            last.rows.append(row)  # type: ignore[union-attr]

    def flush(self) -> None:
        """Sum what is in the buffer."""
        with self._lock:
            self._flush()

    def _new_run(self, size: int, run: _Run) -> _Run:
        run.start = -(-self._used // 8) * 8
        if run.start + size > _BYTES:
            self._flush()
            run.start = 0
        self._used, self._last = run.start, run
        self._runs.append(run)
        return run

    def _flush(self) -> None:
        runs, self._runs, self._last, self._used = self._runs, [], None, 0
        with np.errstate(all="ignore"):
            for run in runs:
                count, dtype, routines, shape = run.key
                raw = self._raw[run.start : run.start + len(run.rows) * count * dtype.itemsize].view(dtype)
                run.table[run.rows] = self._terms_of(raw, len(run.rows), routines, shape)
            self._finish_long()

    def _finish_long(self) -> None:
        moments, self._moments = self._moments, {}
        tokens, self._tokens, self._waiting = self._tokens, {}, 0
        for table, rows, found in moments.values():
            table[rows, _MOMENTS] = found
        for (_, shape), (table, rows, squares) in tokens.items():
            table[rows, _LATE_TOKENS] = late_tokens_of(np.array(squares), shape)

    def _terms_of(self, raw: NDArray[np.generic], rows: int, routines: int, shape: Shape | None) -> NDArray[np.float64]:
        """Terms of several tensors, one after the other: ``[row, WIDTH]``."""
        entries, found = narrowed(raw).reshape(rows, -1), np.zeros((rows, WIDTH))
        of_tokens = shape if routines & 1 << Routine.LATE_TOKENS else None
        sums, squares = power_sums(entries, self._room, of_tokens[2] if of_tokens else 0)
        if of_tokens:
            found[:, _LATE_TOKENS] = late_tokens_of(squares, of_tokens)
        squares = np.add.reduce(squares, axis=1)
        if routines & 1 << Routine.MOMENTS:
            found[:, _MOMENTS] = moments_of_rows(entries, sums, squares, self._room)
        if routines & 1 << Routine.SQUARES:
            found[:, _SQUARES.start], found[:, _SQUARES.start + 1] = entries.shape[1], squares
        return found

    def _take_long(
        self, place: Place, routines: int, shape: Shape | None, table: NDArray[np.float64], row: int
    ) -> None:
        """Terms of a tensor where it lies."""
        both = routines & _BOTH == _BOTH and shape is not None and shape[2] <= LENGTH
        if routines & 1 << Routine.MOMENTS:
            moments, squares = host_moments_and_squares(place, self._room, *shape[2:] if both and shape else ())
            _, rows, found = self._moments.setdefault(id(table), (table, [], []))
            rows.append(row)
            found.append(moments)
            if both and shape is not None:
                self._keep_tokens(table, row, shape, squares)
        if routines & 1 << Routine.LATE_TOKENS and shape is not None and not both:
            table[row, _LATE_TOKENS] = host_late_tokens(place, shape, self._room)
        if routines & 1 << Routine.SQUARES:
            table[row, _SQUARES] = place[1], host_squares(place, self._room)

    def _keep_tokens(self, table: NDArray[np.float64], row: int, shape: Shape, squares: NDArray[np.float64]) -> None:
        _, rows, found = self._tokens.setdefault((id(table), shape), (table, [], []))
        rows.append(row)
        found.append(squares)
        self._waiting += len(squares)
        if self._waiting > _RUN:
            with np.errstate(all="ignore"):
                self._finish_long()
