"""Sums over tensors in host memory, in numpy: what a machine without the compiled kernel has.

An operation on few entries costs a third of one of torch. Where several tensors of one shape are summed together, as
`keelscope.batch` does, it costs less again. All sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from keelscope.onhost import Place, entries_at, narrowed

__all__ = [
    "BLOCK",
    "LENGTH",
    "host_late_tokens",
    "host_moments",
    "host_squares",
    "late_tokens_of_rows",
    "moments_of_rows",
    "power_sums",
]

BLOCK = 1 << 15
"""Entries that are compared at once."""
LENGTH = 1 << 13
"""Entries that are widened and multiplied at once: they stay in the fastest cache, and wake no threads of BLAS."""
_ONES = np.ones((LENGTH, 1))
_LINE = _ONES[:, 0]
_TINY = 1e-280


def host_moments(place: Place, room: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Moments of one tensor, see `keelscope.statistics.MOMENTS`.

    Args:
        place: of at least one entry.
        room: `LENGTH` numbers that are overwritten.

    Returns:
        ``[6]``.
    """
    room = np.empty(LENGTH) if room is None else room
    with np.errstate(all="ignore"):
        return _joined([_moments_of_piece(piece, room) for piece in _pieces(place)])


def host_squares(place: Place, room: NDArray[np.float64] | None = None) -> float:
    """Sum of the squares of all entries of one tensor.

    Args:
        place: where it lies.
        room: `LENGTH` numbers that are overwritten.

    Returns:
        The sum.
    """
    room = np.empty(LENGTH) if room is None else room
    with np.errstate(all="ignore"):
        return sum(float(wide.dot(wide)) for piece in _pieces(place) for wide in _chunks(piece, room))


def host_late_tokens(
    place: Place, shape: tuple[int, ...], room: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Sums over the later half of positions of one tensor, as `keelscope.kernel.Routine.LATE_TOKENS`.

    Args:
        place: of at least one entry.
        shape: ``batch, position, feature``.
        room: `LENGTH` numbers that are overwritten.

    Returns:
        ``[3]``.
    """
    late = narrowed(entries_at(place).reshape(shape)[:, shape[1] // 2 :])
    with np.errstate(all="ignore"):
        return late_tokens_of_rows(late[None], np.empty(LENGTH) if room is None else room).reshape(3)


def _pieces(place: Place) -> Iterator[NDArray[np.floating]]:
    entries = entries_at(place)
    return (narrowed(entries[at : at + BLOCK]) for at in range(0, len(entries), BLOCK))


def _chunks(piece: NDArray[np.floating], room: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
    """The entries in float64, a room full at a time."""
    return (_widened(piece[at : at + LENGTH], room) for at in range(0, len(piece), LENGTH))


def _moments_of_piece(piece: NDArray[np.floating], room: NDArray[np.float64]) -> tuple[float, ...]:
    """`moments_of_rows` of one long row, with as few operations of numpy as can be."""
    count, total, squares = len(piece), 0.0, 0.0
    for wide in _chunks(piece, room):
        total += float(wide.dot(_LINE[: len(wide)]))
        squares += float(wide.dot(wide))
    high, low = float(np.maximum.reduce(piece)), float(np.minimum.reduce(piece))
    top = -low if high < -low else high  # NaN if there is one: then both are
    mean, zeros, nonfinite = total / count, int(np.count_nonzero(piece == 0)), 0
    centred = squares - total * mean
    if not (squares > 2 * total * mean and _TINY < squares < math.inf):
        centred = _centred_squares(piece, mean)
        nonfinite = 0 if math.isfinite(mean) else count - int(np.count_nonzero(np.isfinite(piece)))
    return count, mean, centred, top, zeros, nonfinite


def _centred_squares(entries: NDArray[np.floating], mean: float) -> float:
    """Where the mean is large beside the spread, a difference of sums has lost digits."""
    total = 0.0
    for at in range(0, len(entries), LENGTH):
        gaps = entries[at : at + LENGTH].astype(np.float64) - mean
        total += float(gaps.dot(gaps))
    return total


def power_sums(
    rows: NDArray[np.floating], room: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of the entries and of their squares, in float64.

    Args:
        rows: ``[row, entry]``, from one entry to `LENGTH`.
        room: `LENGTH` numbers that are overwritten.

    Returns:
        ``[row]`` each.
    """
    count = rows.shape[1]
    several, sums, squares = LENGTH // count, np.empty((len(rows), 1, 1)), np.empty((len(rows), 1, 1))
    for first in range(0, len(rows), several):
        some = slice(first, first + several)
        wide = _widened(rows[some], room)
        np.matmul(wide[:, None, :], _ONES[:count], out=sums[some])
        np.matmul(wide[:, None, :], wide[:, :, None], out=squares[some])
    return sums.reshape(-1), squares.reshape(-1)


def _widened(entries: NDArray[np.floating], room: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same in float64, in the room unless they are."""
    if entries.dtype == np.float64:
        return entries  # type: ignore[return-value]
    wide = room[: entries.size].reshape(entries.shape)
    wide[:] = entries
    return wide


def moments_of_rows(rows: NDArray[np.floating], room: NDArray[np.float64]) -> NDArray[np.float64]:
    """Moments of several tensors of the same length, see `keelscope.statistics.MOMENTS`.

    Args:
        rows: ``[row, entry]``, from one entry to `LENGTH`.
        room: `LENGTH` numbers that are overwritten.

    Returns:
        ``[row, 6]``.
    """
    count = rows.shape[1]
    found = np.zeros((len(rows), 6))
    sums, squares = power_sums(rows, room)
    found[:, 0] = count
    found[:, 1] = means = sums / count
    off_centre = sums * means
    found[:, 2] = squares - off_centre
    found[:, 3] = np.maximum(np.maximum.reduce(rows, axis=1), -np.minimum.reduce(rows, axis=1))
    found[:, 4] = _zeros(rows)
    near = (squares > 2 * off_centre) & (squares > _TINY) & (squares < np.inf)
    for row in np.flatnonzero(~near) if not near.all() else ():  # NaN and Inf end up here too
        found[row, 2] = _centred_squares(rows[row], means[row])
        found[row, 5] = 0 if np.isfinite(means[row]) else count - np.count_nonzero(np.isfinite(rows[row]))
    return found


def _zeros(rows: NDArray[np.floating]) -> NDArray[np.intp] | int:
    """``[row, entry] -> [row]``; most tensors have none, and counting row by row takes several times as long."""
    zero = rows == 0
    return np.count_nonzero(zero, axis=1) if np.count_nonzero(zero) else 0


def late_tokens_of_rows(late: NDArray[np.floating], room: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over tokens of several tensors, as `keelscope.kernel.Routine.LATE_TOKENS`.

    Args:
        late: ``[row, batch, late position, feature]``, at least one entry.
        room: `LENGTH` numbers that are overwritten.

    Returns:
        ``[row, 3]``: sum of log10 of norms, tokens above 0, tokens at 0.
    """
    count, _, length, width = late.shape
    late = late.reshape(-1, length, width)
    squares = np.empty((len(late), length))
    tokens = min(length, max(1, LENGTH // width))
    samples = max(1, LENGTH // (tokens * width))
    room = room if width <= LENGTH else np.empty(width)
    for first in range(0, len(late), samples):
        for at in range(0, length, tokens):
            place = slice(first, first + samples), slice(at, at + tokens)
            wide = _widened(late[place], room)
            squares[place] = np.matmul(wide[..., None, :], wide[..., :, None])[..., 0, 0]
    found, of_row = np.zeros((count, 3)), squares.reshape(count, -1)
    found[:, 2] = zeros = _zeros(of_row)
    found[:, 1] = of_row.shape[1] - zeros
    found[:, 0] = 0.5 * np.log10(np.where(of_row == 0, 1.0, of_row) if np.any(zeros) else of_row).sum(axis=1)
    return found


def _joined(pieces: list[tuple[float, ...]]) -> NDArray[np.float64]:
    """Moments of all pieces together: centred squares plus the spread of the means."""
    if len(pieces) == 1:
        return np.array(pieces[0], dtype=np.float64)
    counts, means, centred, top, zeros, nonfinite = np.array(pieces).T
    total = counts.sum()
    mean = (counts * means).sum() / total
    m2 = centred.sum() + (counts * np.square(means - mean)).sum()
    return np.array([total, mean, m2, top.max(), zeros.sum(), nonfinite.sum()])
