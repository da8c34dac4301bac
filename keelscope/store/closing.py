"""Closes a run file so that every HDF5 tool can open it, also when the disk has no room for HDF5's own last writes.

Used by `worker`, which holds the lock of the file.
"""

from __future__ import annotations

import os
from pathlib import Path

import h5py

from keelscope.store import superblock

__all__ = ["close_file"]


def close_file(file: h5py.File, path: Path) -> None:
    """Close a file that was being written and make it durable.

    Args:
        file: the open file.
        path: its name.

    Raises:
        OSError: if it could not be closed or not be made durable.
    """
    try:
        file.close()
    except (OSError, RuntimeError):
        # On a full disk HDF5 fails to extend the file to what it has allocated; the second call lets go of it.
        file.close()
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _mend_end(descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    _sync_folder(path.parent)


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
