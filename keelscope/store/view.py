"""`ClosedView`: the bytes of a run file as a read-only Python file, with the superblock a close would have left.

`opening` hands it to HDF5, which sees a closed file whatever became of the writer.
"""

from __future__ import annotations

import io
import os

from keelscope.store import superblock
from keelscope.store.heaps import HeapGuard

__all__ = ["ClosedView"]

_MAX_MISSING = 2**30
_GROWING = 2**50


class ClosedView(io.RawIOBase):
    """A read-only file that owns a descriptor and shows a repaired superblock.

    Args:
        descriptor: an open regular file; closed with the view.
        growing: whether the file is being written, so that what HDF5 reads later may lie beyond its present end.
    """

    def __init__(self, descriptor: int, *, growing: bool = False) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._place = 0
        self._guard: HeapGuard | None = HeapGuard(self.peek)
        self._head = os.pread(descriptor, superblock.SIZE, 0)
        self._size = os.fstat(descriptor).st_size
        block = superblock.parse(self._head)
        if block is not None and block.flags != superblock.CLOSED:
            promised = _GROWING if growing else min(block.end_of_file, self._size + _MAX_MISSING)
            self._size = max(self._size, promised)
            self._head = superblock.repaired(self._head, self._size)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read at the current place; where the superblock promises more than the file has, it is zeros.

        Args:
            buffer: where to.

        Returns:
            Number of bytes read.
        """
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._size - self._place))
        got = 0
        while got < wanted:
            part = os.preadv(self._descriptor, [view[got:wanted]], self._place + got)
            if part == 0:
                view[got:wanted] = bytes(wanted - got)
                break
            got += part
        if self._place < len(self._head):
            fixed = self._head[self._place : self._place + wanted]
            view[: len(fixed)] = fixed
        if self._guard is not None:
            self._guard.check(self._place, got)
        self._place += wanted
        return wanted

    def peek(self, place: int, size: int) -> bytes:
        """Bytes of the file, as they are.

        Args:
            place: where they begin.
            size: how many.

        Returns:
            The bytes, fewer at the end of the file.
        """
        return os.pread(self._descriptor, size, place) if place < _GROWING else b""

    def expect_numbers(self) -> None:
        """Stop looking for text, once everything but numbers was read: some numbers look like the start of a heap."""
        self._guard = None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a place.

        Args:
            offset: bytes from where ``whence`` says.
            whence: start, current place or end.

        Returns:
            The new place.
        """
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        """The current place."""
        return self._place

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Close the descriptor, once."""
        if not self.closed:
            os.close(self._descriptor)
        super().close()
