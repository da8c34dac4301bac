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

from keelscope.onhost import Place, entries_at, narrowed

__all__ = [
    "BLOCK",
    "LENGTH",
    "Shape",
    "host_late_tokens",
    "host_moments",
    "host_moments_and_late_tokens",
    "host_squares",
    "late_tokens_of",
    "make_room",
    "moments_of_rows",
    "power_sums",
]

BLOCK = 1 << 15
"""Entries that are widened at once: they stay in the cache of a core."""
LENGTH = 1 << 13
"""Most entries of one product: so many wake no threads of BLAS."""
_LINE = 1 << 11
"""Entries of one product where nothing asks for another length."""
_ONES = np.ones((LENGTH, 1))
_TINY = 1e-280

Shape = tuple[int, ...]


def make_room() -> NDArray[np.float64]:
    """What entries are widened into; one call at a time may use it."""
    return np.empty(BLOCK)


def host_moments(place: Place, room: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Moments of one tensor, see `keelscope.statistics.MOMENTS`.

    Args:
        place: of at least one entry.
        room: see `make_room`.

    Returns:
        ``[6]``.
    """
    room = make_room() if room is None else room
    with np.errstate(all="ignore"):
        return _joined([_moments_of_piece(piece, room, _LINE)[0] for piece in _pieces(place)])


def host_squares(place: Place, room: NDArray[np.float64] | None = None) -> float:
    """Sum of the squares of all entries of one tensor.

    Args:
        place: where it lies.
        room: see `make_room`.

    Returns:
        The sum.
    """
    room = make_room() if room is None else room
    with np.errstate(all="ignore"):
        return sum(_sum_of_squares(_widened(piece, room)) for piece in _pieces(place))


def host_late_tokens(place: Place, shape: Shape, room: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """Sums over the later half of positions of one tensor, as `keelscope.kernel.Routine.LATE_TOKENS`.

    Args:
        place: of at least one entry.
        shape: ``batch, position, feature``.
        room: see `make_room`.

    Returns:
        ``[3]``.
    """
    late, width = entries_at(place).reshape(shape)[:, shape[1] // 2 :], shape[2]
    tokens, several = narrowed(late).reshape(-1, width), max(1, BLOCK // width)
    room = np.empty(width) if width > BLOCK else make_room() if room is None else room
    with np.errstate(all="ignore"):
        parts = (_widened(tokens[at : at + several], room) for at in range(0, len(tokens), several))
        return _sums_of_logs(np.concatenate([_products(wide) for wide in parts])[None]).reshape(3)


def host_moments_and_late_tokens(
    place: Place, shape: Shape, room: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`host_moments` and `host_late_tokens`, of entries that are widened once.

    Args:
        place: of at least one entry.
        shape: ``batch, position, feature``.
        room: see `make_room`.

    Returns:
        ``[6]`` and ``[3]``.
    """
    width = shape[2]
    if width > LENGTH:
        return host_moments(place, room), host_late_tokens(place, shape, room)
    with np.errstate(all="ignore"):
        found = [_moments_of_piece(piece, room, width) for piece in _pieces(place, BLOCK // width * width)]
        squares = np.concatenate([of_tokens for _, of_tokens in found])
        return _joined([moments for moments, _ in found]), late_tokens_of(squares[None], shape).reshape(3)


def _pieces(place: Place, size: int = BLOCK) -> Iterator[NDArray[np.floating]]:
    entries = entries_at(place)
    return (narrowed(entries[at : at + size]) for at in range(0, len(entries), size))


def _moments_of_piece(
    piece: NDArray[np.floating], room: NDArray[np.float64], width: int
) -> tuple[tuple[float, ...], NDArray[np.float64]]:
    """`moments_of_rows` of one long row, with as few operations of numpy as can be; and squares by tokens of it."""
    count, wide = len(piece), _widened(piece, room)
    whole = count - count % width
    of_tokens = _products(wide[:whole].reshape(-1, width))
    total, squares = _sum(wide), float(np.add.reduce(of_tokens)) + _sum_of_squares(wide[whole:])
    high, low = float(np.maximum.reduce(piece)), float(np.minimum.reduce(piece))
    top = -low if high < -low else high  # NaN if there is one: then both are
    zeros = 0 if low > 0 or high < 0 else int(np.count_nonzero(piece == 0))
    mean, nonfinite = total / count, 0
    centred = squares - total * mean
    if not (squares > 2 * total * mean and _TINY < squares < math.inf):
        centred = _centred_squares(piece, mean, room)
        nonfinite = 0 if math.isfinite(mean) else count - int(np.count_nonzero(np.isfinite(piece)))
    return (count, mean, centred, top, zeros, nonfinite), of_tokens


def _products(lines: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each line with itself: ``[line, entry] -> [line]``."""
    products: NDArray[np.float64] = np.matmul(lines[:, None, :], lines[:, :, None])
    return products.reshape(-1)


def _sum(wide: NDArray[np.float64]) -> float:
    whole = len(wide) - len(wide) % _LINE
    rest = float(wide[whole:].dot(_ONES[: len(wide) - whole, 0])) if whole < len(wide) else 0.0
    return float(np.add.reduce(np.matmul(wide[:whole].reshape(-1, 1, _LINE), _ONES[:_LINE]), axis=None)) + rest


def _sum_of_squares(wide: NDArray[np.float64]) -> float:
    if len(wide) <= LENGTH:
        return float(wide.dot(wide))
    whole = len(wide) - len(wide) % _LINE
    return float(np.add.reduce(_products(wide[:whole].reshape(-1, _LINE)))) + float(wide[whole:].dot(wide[whole:]))


def _centred_squares(entries: NDArray[np.floating], mean: float, room: NDArray[np.float64]) -> float:
    """Where the mean is large beside the spread, a difference of sums has lost digits."""
    return _sum_of_squares(np.subtract(entries, mean, out=room[: len(entries)], dtype=np.float64))


def power_sums(
    rows: NDArray[np.floating], room: NDArray[np.float64], width: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums of the entries and of their squares, in float64.

    Args:
        rows: ``[row, entry]``, from one entry to `LENGTH`.
        room: see `make_room`.
        width: of parts of a row whose squares are summed, if not all of it.

    Returns:
        ``[row]``; and ``[row, part]``.
    """
    count = rows.shape[1]
    width = width or count
    several, sums, squares = BLOCK // count, np.empty((len(rows), 1, 1)), np.empty((len(rows), count // width))
    for first in range(0, len(rows), several):
        some = slice(first, first + several)
        wide = _widened(rows[some], room)
        np.matmul(wide[:, None, :], _ONES[:count], out=sums[some])
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
    rows: NDArray[np.floating], sums: NDArray[np.float64], squares: NDArray[np.float64], room: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Moments of several tensors of the same length, see `keelscope.statistics.MOMENTS`.

    Args:
        rows: ``[row, entry]``, from one entry to `LENGTH`.
        sums: of the entries of each, see `power_sums`.
        squares: of each row.
        room: see `make_room`.

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


def _joined(pieces: list[tuple[float, ...]]) -> NDArray[np.float64]:
    """Moments of all pieces together: centred squares plus the spread of the means."""
    if len(pieces) == 1:
        return np.array(pieces[0], dtype=np.float64)
    counts, means, centred, top, zeros, nonfinite = np.array(pieces).T
    total = counts.sum()
    mean = (counts * means).sum() / total
    m2 = centred.sum() + (counts * np.square(means - mean)).sum()
    return np.array([total, mean, m2, top.max(), zeros.sum(), nonfinite.sum()])
