"""What entries of tensors are widened into to be summed in float64, in the shapes that products want them in.

A view of an array takes numpy as long as a thousand entries of it; tensors of one length want the same views again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "COLUMN", "LENGTH", "LINE", "ONES", "Room", "Views", "spare_room"]

BLOCK = 1 << 15
"""Entries that are widened at once: they stay in the cache of a core."""
LENGTH = 1 << 13
"""Most entries of one product: so many wake no threads of BLAS."""
LINE = 1 << 11
"""Entries of one product where nothing asks for another length."""
_KINDS = 64
_BYTES = 64  # of a line of the cache: sums take a third longer where every other word of the processor spans two


def _aligned(size: int) -> NDArray[np.float64]:
    raw = np.empty(size + _BYTES // 8)
    first = -raw.ctypes.data % _BYTES // 8
    return raw[first : first + size]


ONES = _aligned(LENGTH)
"""So many."""
ONES[:] = 1.0
COLUMN = ONES[:, None]
"""The same, ``[entry, 1]``."""


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """The first entries of a room."""

    wide: NDArray[np.float64]
    """``[entry]``."""
    bits: NDArray[np.uint32]
    """Room for as many numbers of half the width, at the same place."""
    rows: NDArray[np.float64]
    """``[line, 1, width]``: all lines that are full."""
    columns: NDArray[np.float64]
    """``[line, width, 1]``."""
    rest: NDArray[np.float64] | None
    """What is left of them; None if nothing is."""
    long_rows: NDArray[np.float64]
    """``[line, 1, LINE]``."""
    long_rest: NDArray[np.float64] | None
    products: NDArray[np.float64]
    """``[line, 1, 1]``: of long rows."""
    sums: NDArray[np.float64]
    """The same, ``[line]``."""
    ones: NDArray[np.float64]
    """As many."""


class Room:
    """Room for `BLOCK` entries; one call at a time may use it."""

    def __init__(self) -> None:
        self.wide = _aligned(BLOCK)
        self._views: dict[tuple[int, int], Views] = {}

    def views(self, count: int, width: int) -> Views:
        """Views of the first entries.

        Args:
            count: how many, up to `BLOCK`.
            width: of a line.

        Returns:
            The views.
        """
        known = self._views.get((count, width))
        if known is None:
            if len(self._views) >= _KINDS:
                self._views.clear()
            known = self._views[count, width] = _views(self.wide, count, width)
        return known


_spare = threading.local()


def spare_room() -> Room:
    """A room of this thread's own."""
    found = getattr(_spare, "room", None)
    if not isinstance(found, Room):
        found = _spare.room = Room()
    return found


def _views(room: NDArray[np.float64], count: int, width: int) -> Views:
    whole, long = count - count % width, count - count % LINE
    wide, lines, products = room[:count], room[:whole].reshape(-1, width), np.empty((long // LINE, 1, 1))
    return Views(
        wide,
        room.view(np.uint32)[:count],
        lines[:, None, :],
        lines[:, :, None],
        wide[whole:] if whole < count else None,
        wide[:long].reshape(-1, 1, LINE),
        wide[long:] if long < count else None,
        products,
        products.reshape(-1),
        ONES[: len(products)],
    )
