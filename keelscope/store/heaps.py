"""Checks HDF5's global heaps, which hold all text of variable length, before HDF5 reads them.

A global heap has no checksum, and HDF5 (2.0 at least) loops for ever over one whose free space has size 0, as a zeroed
page or a malicious file can make it. Layout: HDF5 file format specification 3.0, section III.E. Used by `view`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

__all__ = ["HeapGuard"]

_SIGNATURE: Final = b"GCOL\x01"
_HEADER: Final = 16
_OBJECT: Final = struct.Struct("<HHIQ")
_BUDGET: Final = 64 * 2**20


class HeapGuard:
    """Looks for heaps in what HDF5 reads, and checks each one once.

    Args:
        read: reads bytes of the file, from place and size.
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._budget = _BUDGET
        self._sound: set[int] = set()

    def check(self, place: int, size: int) -> None:
        """Check every heap that starts in a part of the file, or whose signature reaches into it.

        Args:
            place: where the part begins.
            size: its bytes.

        Raises:
            OSError: if HDF5 must not see one of them.
        """
        margin = len(_SIGNATURE) - 1
        first = max(0, place - margin)
        part = self._read(first, place - first + size + margin)
        at = part.find(_SIGNATURE)
        while at >= 0:
            if first + at not in self._sound:
                self._check_heap(first + at)
                self._sound.add(first + at)
            at = part.find(_SIGNATURE, at + 1)

    def _check_heap(self, address: int) -> None:
        head = self._read(address, _HEADER)
        (size,) = struct.unpack_from("<Q", head.ljust(_HEADER, b"\0"), 8)
        self._budget -= size
        if self._budget < 0:
            raise OSError("its texts are larger than those of any run file")
        heap = self._read(address, size)
        if len(heap) < size or not _is_sound(heap):
            raise OSError("the part that holds its texts is damaged")


def _is_sound(heap: bytes) -> bool:
    """Whether walking over the objects moves forward and ends at the end."""
    place = _HEADER
    while place + _HEADER <= len(heap):
        index, _, _, size = _OBJECT.unpack_from(heap, place)
        step = _HEADER + (size + 7) // 8 * 8 if index else size
        if step < _HEADER or place + step > len(heap):
            return False
        place += step
    return True
