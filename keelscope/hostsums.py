"""Sums over tensors in host memory, in numpy: what a machine without the compiled kernel has.

An operation on few entries costs a third of one of torch. Where several tensors of one shape are summed together, as
`keelscope.batch` does, it costs less again. All sums are in float64: entries are widened once, and all that is wanted
of them is taken from there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from keelscope.onhost import FLOAT32, Place, entries_at, narrowed, words_at
from keelscope.rooms import BLOCK, COLUMN, LENGTH, LINE, ONES, Room, Views, spare_room

__all__ = [
    "Moments",
    "Shape",
    "host_late_tokens",
    "host_moments",
    "host_moments_and_squares",
    "host_squares",
    "late_tokens_of",
    "moments_of_floats",
    "moments_of_rows",
    "power_sums",
    "squares_in_silence",
]

_TINY = 1e-280
_LINE_OF_ONES = COLUMN[:LINE]
_MINUS_2, _ONE = np.uint32((1 << 32) - 2), np.uint32(1)

Moments = tuple[float, ...]
"""See `keelscope.statistics.MOMENTS`."""

Shape = tuple[int, ...]


def host_moments(place: Place, room: Room | None = None) -> NDArray[np.float64]:
    """Moments of one tensor, see `keelscope.statistics.MOMENTS`.

    Args:
        place: of at least one entry.
        room: to widen entries in.

    Returns:
        ``[6]``.
    """
    return np.array(host_moments_and_squares(place, room or spare_room())[0])


def host_squares(place: Place, room: Room | None = None) -> float:
    """Sum of the squares of all entries of one tensor.

    Args:
        place: where it lies.
        room: to widen entries in.

    Returns:
        The sum.
    """
    with np.errstate(all="ignore"):
        return squares_in_silence(place, room or spare_room())


def squares_in_silence(place: Place, room: Room) -> float:
    """`host_squares` of one of many, where numpy has been told for all of them to speak of nothing.

    Args:
        place: where it lies.
        room: to widen entries in.

    Returns:
        The sum.
    """
    entries, squares, views = entries_at(place), 0.0, room.views(min(place[1], BLOCK), LINE)
    for at in range(0, place[1], BLOCK):
        piece = narrowed(entries[at : at + BLOCK])
        if len(piece) < len(views.wide):
            views = room.views(len(piece), LINE)
        np.copyto(views.wide, piece)
        squares += _squares_of(views)
    return squares


def host_late_tokens(place: Place, shape: Shape, room: Room | None = None) -> NDArray[np.float64]:
    """Sums over the later half of positions of one tensor, as `keelscope.kernel.Routine.LATE_TOKENS`.

    Args:
        place: of at least one entry.
        shape: ``batch, position, feature``.
        room: to widen entries in.

    Returns:
        ``[3]``.
    """
    late, width = entries_at(place).reshape(shape)[:, shape[1] // 2 :], shape[2]
    tokens, several = narrowed(late).reshape(-1, width), max(1, BLOCK // width)
    wide = np.empty(width) if width > BLOCK else (room or spare_room()).wide
    with np.errstate(all="ignore"):
        parts = (_widened(tokens[at : at + several], wide) for at in range(0, len(tokens), several))
        return _sums_of_logs(np.concatenate([_products(part) for part in parts])[None]).reshape(3)


def host_moments_and_squares(place: Place, room: Room, width: int = LINE) -> tuple[Moments, NDArray[np.float64]]:
    """Moments of one tensor, and the sum of squares of each line of it: of entries that are widened once.

    Args:
        place: of at least one entry.
        room: to widen entries in.
        width: entries of a line, up to `LENGTH`.

    Returns:
        The moments, and ``[line]`` for all lines that are full.
    """
    address, count, dtype = place
    size = BLOCK // width * width
    if dtype is FLOAT32:
        parts = [(address + 4 * at, min(size, count - at)) for at in range(0, count, size)]
        found = [moments_of_floats(first, room.views(several, width), room) for first, several in parts]
    else:
        with np.errstate(all="ignore"):
            pieces = list(_pieces(place, size))
            found = [_moments_with(p, *_extremes(p), room.views(len(p), width), room) for p in pieces]
    if len(found) == 1:
        return found[0]
    return _joined([moments for moments, _ in found]), np.concatenate([squares for _, squares in found])


def _pieces(place: Place, size: int = BLOCK) -> Iterator[NDArray[np.floating]]:
    entries = entries_at(place)
    return (narrowed(entries[at : at + size]) for at in range(0, len(entries), size))


def moments_of_floats(address: int, views: Views, room: Room) -> tuple[Moments, NDArray[np.float64]]:
    """`host_moments_and_squares` of float32, with as few operations of numpy as can be.

    Args:
        address: of the first entry.
        views: of the room, for as many entries as there are and the width of a line.
        room: to widen entries in.

    Returns:
        See there.
    """
    piece, words = words_at(address, len(views.wide))
    # As whole numbers magnitudes keep their order, NaN above all. Times -2 the sign drops out and the order turns:
    # the least belongs to the largest magnitude, unless there is a 0, which stays one until 1 is taken away.
    turned, zeros = np.multiply(words, _MINUS_2, views.bits), 0
    first = turned.argmin()
    if not turned.item(first):
        zeros = int(np.count_nonzero(turned == 0))
        first = np.subtract(turned, _ONE, turned).argmin()
    top = abs(piece.item(first))
    if top < math.inf:  # then nothing can go wrong that numpy would speak of: telling it not to takes its time
        return _moments_with(piece, top, zeros, views, room)
    with np.errstate(all="ignore"):
        return _moments_with(piece, top, zeros, views, room)


def _moments_with(
    piece: NDArray[np.floating], top: float, zeros: int, views: Views, room: Room
) -> tuple[Moments, NDArray[np.float64]]:
    """What is left to find, and all together."""
    np.copyto(views.wide, piece)
    of_lines = np.matmul(views.rows, views.columns).reshape(-1)
    np.matmul(views.long_rows, _LINE_OF_ONES, views.products)
    count, total, squares = len(piece), float(views.sums.dot(views.ones)), _total(of_lines)
    if views.long_rest is not None:
        total += float(views.long_rest.dot(ONES[: len(views.long_rest)]))
    if views.rest is not None:
        squares += float(views.rest.dot(views.rest))
    mean, nonfinite = total / count, 0
    centred = squares - total * mean
    if not (squares > 2 * total * mean and _TINY < squares < math.inf):
        centred = _centred_squares(piece, mean, room)
        nonfinite = 0 if math.isfinite(mean) else count - int(np.count_nonzero(np.isfinite(piece)))
    return (count, mean, centred, top, zeros, nonfinite), of_lines


def _extremes(piece: NDArray[np.floating]) -> tuple[float, int]:
    """The largest magnitude, NaN if there is one; and the number of entries that are 0."""
    high, low = float(np.maximum.reduce(piece)), float(np.minimum.reduce(piece))
    top = -low if high < -low else high  # NaN if there is one: then both are
    return top, int(np.count_nonzero(piece == 0))


def _products(lines: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each line with itself: ``[line, entry] -> [line]``."""
    products: NDArray[np.float64] = np.matmul(lines[:, None, :], lines[:, :, None])
    return products.reshape(-1)


def _total(few: NDArray[np.float64]) -> float:
    return float(few.dot(ONES[: len(few)]) if len(few) <= LENGTH else np.add.reduce(few))


def _centred_squares(entries: NDArray[np.floating], mean: float, room: Room) -> float:
    """Where the mean is large beside the spread, a difference of sums has lost digits."""
    views = room.views(len(entries), LINE)
    np.subtract(entries, mean, out=views.wide, dtype=np.float64)
    return _squares_of(views)


def _squares_of(views: Views) -> float:
    """Of lines of the usual length."""
    np.matmul(views.rows, views.columns, views.products)
    squares = float(views.sums.dot(views.ones))
    return squares if views.rest is None else squares + float(views.rest.dot(views.rest))


def power_sums(
    rows: NDArray[np.floating], room: Room, width: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of the entries and of their squares, in float64.

    Args:
        rows: ``[row, entry]``, from one entry to `LENGTH`.
        room: to widen entries in.
        width: of parts of a row whose squares are summed, if not all of it.

    Returns:
        ``[row]``; and ``[row, part]``.
    """
    count = rows.shape[1]
    width = width or count
    several, sums, squares = BLOCK // count, np.empty((len(rows), 1, 1)), np.empty((len(rows), count // width))
    for first in range(0, len(rows), several):
        some = slice(first, first + several)
        wide = _widened(rows[some], room.wide)
        np.matmul(wide[:, None, :], COLUMN[:count], out=sums[some])
        squares[some] = _products(wide.reshape(-1, width)).reshape(len(wide), -1)
    return sums.reshape(-1), squares


def _widened(entries: NDArray[np.floating], room: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same in float64, in the room unless they are."""
    if entries.dtype == np.float64:
        return entries  # type: ignore[return-value]
    wide = room[: entries.size].reshape(entries.shape)
    np.copyto(wide, entries)
    return wide


def moments_of_rows(
    rows: NDArray[np.floating], sums: NDArray[np.float64], squares: NDArray[np.float64], room: Room
) -> NDArray[np.float64]:
    """Moments of several tensors of the same length, see `keelscope.statistics.MOMENTS`.

    Args:
        rows: ``[row, entry]``, from one entry to `LENGTH`.
        sums: of the entries of each, see `power_sums`.
        squares: of each row.
        room: to widen entries in.

    Returns:
        ``[row, 6]``.
    """
    count = rows.shape[1]
    found = np.zeros((len(rows), 6))
    found[:, 0] = count
    found[:, 1] = means = sums / count
    off_centre = sums * means
    found[:, 2] = squares - off_centre
    found[:, 3] = np.maximum(np.maximum.reduce(rows, axis=1), -np.minimum.reduce(rows, axis=1))
    found[:, 4] = _zeros(rows)
    near = (squares > 2 * off_centre) & (squares > _TINY) & (squares < np.inf)
    for row in np.flatnonzero(~near) if not near.all() else ():  # NaN and Inf end up here too
        found[row, 2] = _centred_squares(rows[row], means[row], room)
        found[row, 5] = 0 if np.isfinite(means[row]) else count - np.count_nonzero(np.isfinite(rows[row]))
    return found


def _zeros(rows: NDArray[np.floating]) -> NDArray[np.intp] | int:
    """``[row, entry] -> [row]``; most tensors have none, and counting row by row takes several times as long."""
    zero = rows == 0
    return np.count_nonzero(zero, axis=1) if np.count_nonzero(zero) else 0


def late_tokens_of(squares: NDArray[np.float64], shape: Shape) -> NDArray[np.float64]:
    """Sums over tokens of several tensors, as `keelscope.kernel.Routine.LATE_TOKENS`.

    Args:
        squares: ``[row, token]``, of all tokens.
        shape: ``batch, position, feature`` of each.

    Returns:
        ``[row, 3]``: sum of log10 of norms, tokens above 0, tokens at 0.
    """
    batch, length, _ = shape
    late = squares.reshape(-1, batch, length)[:, :, length // 2 :]
    return _sums_of_logs(late.reshape(len(squares), -1))


def _sums_of_logs(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    found, zeros = np.zeros((len(squares), 3)), _zeros(squares)
    found[:, 2] = zeros
    found[:, 1] = squares.shape[1] - zeros
    above = squares if isinstance(zeros, int) else np.where(squares == 0, 1.0, squares)
    found[:, 0] = 0.5 * np.add.reduce(np.log10(above), axis=1)
    return found


@np.errstate(all="ignore")
def _joined(pieces: list[Moments]) -> Moments:
    """Moments of all pieces together: centred squares plus the spread of the means."""
    counts, means, centred, top, zeros, nonfinite = np.array(pieces).T
    total = counts.sum()
    mean = (counts * means).sum() / total
    m2 = centred.sum() + (counts * np.square(means - mean)).sum()
    return total, mean, m2, top.max(), zeros.sum(), nonfinite.sum()
