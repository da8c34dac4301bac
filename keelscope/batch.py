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
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keelscope.hostsums import (
    Moments,
    Shape,
    host_late_tokens,
    host_moments_and_squares,
    host_squares,
    late_tokens_of,
    moments_of_floats,
    moments_of_rows,
    power_sums,
)
from keelscope.kernel import COLUMNS, Routine
from keelscope.onhost import FLOAT32, Place, narrowed
from keelscope.rooms import BLOCK, LENGTH, LINE, Room, Views

__all__ = ["WIDTH", "Batch"]

WIDTH = max(columns.stop for columns in COLUMNS.values())
"""Columns of a row of terms."""
_LONG = LENGTH  # entries above which copying costs more than it saves
_RUN = 4 * BLOCK  # entries of one run, and sums that wait
_BYTES = 64 * BLOCK
_MOMENTS, _SQUARES, _LATE_TOKENS = COLUMNS[Routine.MOMENTS], COLUMNS[Routine.SQUARES], COLUMNS[Routine.LATE_TOKENS]
_BOTH = 1 << Routine.MOMENTS | 1 << Routine.LATE_TOKENS
_Table = NDArray[np.float64]
_Kind = tuple[int, int, np.dtype[np.generic], int, Shape | None]
"""Identity of the table, number of entries, their type, routines, shape."""


@dataclass(slots=True, eq=False)
class _Run:
    """Tensors of one shape, one after the other in the buffer."""

    key: tuple[int, np.dtype[np.generic], int, Shape | None]
    """Number of entries, their type, routines and shape."""
    start: int
    table: NDArray[np.float64]
    """``[row, WIDTH]``, where terms go."""
    rows: list[int]


@dataclass(slots=True, eq=False)
class _Long:
    """What was found of long tensors of one length and waits for more of its kind."""

    table: NDArray[np.float64]
    shape: Shape | None
    """Of the tensors, where squares of tokens wait too."""
    width: int
    """Of a line whose squares are summed."""
    views: Views | None
    """Of the room, where a tensor fits in."""
    rows: list[int] = field(default_factory=list)
    moments: list[Moments] = field(default_factory=list)
    squares: list[NDArray[np.float64]] = field(default_factory=list)


class Batch:
    """A buffer of entries that are still to be summed."""

    def __init__(self) -> None:
        self._long: dict[_Kind, _Long] = {}
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
                kind = id(table), count, dtype, routines, shape
                long = self._long.get(kind) or self._new_long(kind, table)
                if long.views is None:
                    self._take_long(place, routines, shape, long, row)
                else:
                    self._keep(long, row, *moments_of_floats(address, long.views, self._room))
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
        long, self._long, self._waiting = self._long, {}, 0
        for one in long.values():
            if one.rows:
                one.table[one.rows, _MOMENTS] = one.moments
            if one.shape is not None:
                one.table[one.rows, _LATE_TOKENS] = late_tokens_of(np.array(one.squares), one.shape)

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

    def _new_long(self, kind: _Kind, table: _Table) -> _Long:
        _, count, dtype, routines, shape = kind
        of_tokens = shape if routines & _BOTH == _BOTH and shape is not None and shape[2] <= LENGTH else None
        width = LINE if of_tokens is None else of_tokens[2]
        is_simple = routines in {1 << Routine.MOMENTS, _BOTH if of_tokens or shape is None else 0}
        fits = is_simple and dtype is FLOAT32 and count <= BLOCK // width * width
        self._long[kind] = long = _Long(table, of_tokens, width, self._room.views(count, width) if fits else None)
        return long

    def _take_long(self, place: Place, routines: int, shape: Shape | None, long: _Long, row: int) -> None:
        """Terms of any tensor where it lies."""
        if routines & 1 << Routine.MOMENTS:
            self._keep(long, row, *host_moments_and_squares(place, self._room, long.width))
        if routines & 1 << Routine.LATE_TOKENS and shape is not None and long.shape is None:
            long.table[row, _LATE_TOKENS] = host_late_tokens(place, shape, self._room)
        if routines & 1 << Routine.SQUARES:
            long.table[row, _SQUARES] = place[1], host_squares(place, self._room)

    def _keep(self, long: _Long, row: int, moments: Moments, squares: NDArray[np.float64]) -> None:
        """Until there are more of their kind."""
        long.rows.append(row)
        long.moments.append(moments)
        if long.shape is not None:
            long.squares.append(squares)
            self._waiting += len(squares)
            if self._waiting > _RUN:
                with np.errstate(all="ignore"):
                    self._finish_long()
