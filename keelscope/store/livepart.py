"""One part of a run while it is written: an HDF5 file in SWMR mode, from its first byte to its durable close.

The file is built under a temporary name and linked to the final one, which fails if that exists: nothing is ever
overwritten and nobody sees half a file. Where the run lies on a file system that SWMR cannot use, the part is written
to a scratch file on the local disk and published when it is closed. `worker` owns the parts of a rank.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import h5py
from h5py._objects import phil  # HDF5's own lock, which h5py holds over a fork

from keelscope.store.closing import close_file, sync_folder
from keelscope.store.commit import Committer, State
from keelscope.store.encoding import create_objects
from keelscope.store.schema import RunLayout

__all__ = ["LivePart"]

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_open: set[int] = set()
"""Descriptors of the files this process writes."""


class LivePart:
    """A part that is being written.

    Args:
        path: its final name.
        layout: what it will hold, with its `PartInfo`.
        in_scratch: write it on the local disk and publish it when it is closed.

    Raises:
        FileExistsError: if the name is taken.
        OSError: if it cannot be created.
    """

    def __init__(self, path: Path, layout: RunLayout, *, in_scratch: bool = False) -> None:
        self.path, self.layout = path, layout
        self.scratch = Path(tempfile.mkdtemp(prefix="keelscope-")) / path.name if in_scratch else None
        self.place = self.scratch or path
        """Where the bytes are now."""
        self.born = time.monotonic()
        temporary = _temporary_name(self.place)
        self.file = _opened(temporary)
        self._descriptor = int(self.file.id.get_vfd_handle())
        try:
            create_objects(self.file, layout)
            self.file.flush()
            self.file.swmr_mode = True
            self.file.flush()
            self.committer = Committer(self.file, layout)
            _link(temporary, self.place)
        except BaseException:
            self._let_go()
            temporary.unlink(missing_ok=True)
            raise

    def is_in_place(self) -> bool:
        """Whether what is written still goes to the file of that name.

        Returns:
            False if the file, its folder or its disk is gone.
        """
        try:
            return os.path.samestat(self.place.stat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def sync(self) -> None:
        """Wait until the disk has what was committed.

        Raises:
            OSError: if the disk is gone.
        """
        os.fdatasync(self._descriptor)

    def close(self, state: State, dropped: int) -> None:
        """Close the file for good and make it durable.

        Args:
            state: last entry of its status.
            dropped: rows that were lost while it was written.

        Raises:
            OSError: if that could not be done; what was committed is there all the same.
        """
        with ExitStack() as steps:  # each is tried, whatever happened to the one before
            steps.callback(close_file, self.place)
            steps.callback(self._let_go)
            steps.callback(self.committer.report, state, dropped)
            self.committer.trim()

    def abandon(self) -> None:
        """Let go of a file that is gone."""
        self._let_go()

    def publish(self) -> None:
        """Copy a closed scratch file to its final name; it goes only when the copy is durable.

        Raises:
            OSError: if the place cannot be written.
        """
        if self.scratch is None:
            return
        _copy(self.scratch, self.path)
        shutil.rmtree(self.scratch.parent, ignore_errors=True)

    def _let_go(self) -> None:
        with phil:
            _open.discard(self._descriptor)
            try:
                self.file.close()
            except (OSError, RuntimeError):
                # On a full disk HDF5 fails to extend the file to what it has allocated; the second call lets go of it.
                self.file.close()


def _opened(path: Path) -> h5py.File:
    """A new file, known to `_disarm` before any other thread can fork."""
    _watch_forks()
    with phil:
        file = h5py.File(path, "x", libver=("v110", "v110"), rdcc_nbytes=0, track_order=True, locking=False)
        _open.add(int(file.id.get_vfd_handle()))
    return file


@cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_disarm)


def _disarm() -> None:
    """In a forked child: make every write that HDF5 may still do to the parent's files go nowhere.

    Without this, a child that ends normally closes the file and clears the flag that says it is being written.
    """
    for descriptor in _open:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    _open.clear()


def _temporary_name(path: Path) -> Path:
    """A hidden name beside the file, different for every process and writer."""
    return path.with_name(f".keelscope-{os.getpid()}-{os.urandom(4).hex()}.tmp")


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "the run file exists", str(path)) from None
        temporary.rename(path)
    else:
        temporary.unlink()


def _copy(scratch: Path, path: Path) -> None:
    temporary = _temporary_name(path)
    try:
        shutil.copyfile(scratch, temporary)
        with temporary.open("rb+") as copy:
            os.fsync(copy.fileno())
        _link(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
