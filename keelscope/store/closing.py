"""Makes a closed run file durable and whole, also when the disk had no room for HDF5's own last writes.

Used by `livepart` after HDF5 has let go of the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from keelscope.store import superblock

__all__ = ["close_file", "sync_folder"]


def close_file(path: Path) -> None:
    """Mend the end of a file that HDF5 has closed, and wait until the disk has it.

    Args:
        path: its name.

    Raises:
        OSError: if it could not be made durable.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _mend_end(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def _mend_end(descriptor: int) -> None:
    """Let a closed file end where its superblock says, or the superblock say where it ends."""
    head = os.pread(descriptor, superblock.SIZE, 0)
    block, size = superblock.parse(head), os.fstat(descriptor).st_size
    if block is None or block.flags != superblock.CLOSED or block.end_of_file <= size:
        return
    try:
        os.ftruncate(descriptor, block.end_of_file)
    except OSError:
        os.pwrite(descriptor, superblock.repaired(head, size), 0)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder.

    Args:
        folder: the folder.

    Raises:
        OSError: if it is gone.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
