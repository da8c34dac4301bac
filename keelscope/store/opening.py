"""Opens a run file in the one way that suits its state, which is read from the superblock before HDF5 sees the file.

HDF5 sees every file behind a read-only view of its bytes, with the superblock that a close would have left: the file
itself is not touched, whether it is closed, its writer died, or is still writing. Reading a live file as a SWMR reader
is not needed and not safe: on a torn piece of metadata such a reader waits for ever inside HDF5, where nothing can stop
it. A reader behind the view gets an error from the same bytes, and reads again if the file is live (`filesource`). The
view also keeps this process's handles apart: HDF5 shares one state among all handles of a file in a process, so a SWMR
reader beside the writer would keep the file open after the writer closed it, and other libraries would be refused over
their locking flags.
"""

from __future__ import annotations

import atexit
import errno
import os
import stat
import weakref
from difflib import get_close_matches
from enum import Enum
from pathlib import Path

import h5py

from keelscope.errors import NotARunFileError, RunFileError, RunNotFoundError
from keelscope.store import superblock
from keelscope.store.lock import Writer, find_writer
from keelscope.store.parts import place_of
from keelscope.store.view import ClosedView

__all__ = ["FileState", "file_state", "open_file"]


_files: weakref.WeakValueDictionary[int, h5py.File] = weakref.WeakValueDictionary()


class FileState(Enum):
    """What the writer of a file is doing."""

    CLOSED = "closed"
    LIVE = "live"
    LIVE_HERE = "live here"
    """Written by this process, or by one that forked it and whose handles it has inherited."""
    DEAD = "dead"


def file_state(path: Path) -> FileState:
    """Whether a run file is closed, being written, or was left by a killed process.

    Args:
        path: the file.

    Returns:
        Its state.

    Raises:
        RunNotFoundError: if there is no such file.
        NotARunFileError: if it cannot be a run file.
        RunFileError: if it may not be read.
    """
    descriptor = _open(path)
    try:
        return _state_of(path, descriptor)
    finally:
        os.close(descriptor)


def open_file(path: Path, state: FileState) -> tuple[h5py.File, ClosedView]:
    """Open a run file for reading.

    Args:
        path: the file.
        state: what `file_state` said about it.

    Returns:
        The open file, and the view through which HDF5 sees it.

    Raises:
        NotARunFileError: if HDF5 cannot read it.
    """
    view = ClosedView(_open(path), growing=state in {FileState.LIVE, FileState.LIVE_HERE})
    try:
        file = h5py.File(view, "r")
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        view.close()
        raise NotARunFileError(f"{path} is damaged: HDF5 cannot open it ({_first_line(error)}).") from error
    _files[id(file)] = file
    return file, view


@atexit.register
def _close_all() -> None:
    """Close what is still open: HDF5 does so when the interpreter is gone, and would call the view, which is Python."""
    for file in list(_files.values()):
        file.close()


def _state_of(path: Path, descriptor: int) -> FileState:
    block = _superblock(path, descriptor)
    if block.flags == superblock.CLOSED:
        size = os.fstat(descriptor).st_size
        if block.end_of_file > size:
            raise NotARunFileError(
                f"{path} is cut off: it has {size} bytes of {block.end_of_file}; copy it again from where it came."
            )
        return FileState.CLOSED
    if block.flags != superblock.WRITING_SWMR:
        raise NotARunFileError(
            f"{path} was left open by another program; if none is writing it, run: h5clear -s --increment=0 FILE."
        )
    writer = find_writer(*place_of(path.absolute()))
    if writer is Writer.HERE or (writer is Writer.PARENT and _has_open_files()):
        return FileState.LIVE_HERE
    if writer not in {Writer.GONE, Writer.SEALING}:
        return FileState.LIVE
    # The writer may have closed the file between the two looks.
    closed = _superblock(path, descriptor).flags == superblock.CLOSED
    return FileState.CLOSED if closed else FileState.DEAD


def _has_open_files() -> bool:
    return int(h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)) > 0


def _superblock(path: Path, descriptor: int) -> superblock.Superblock:
    head = os.pread(descriptor, superblock.SIZE, 0)
    block = superblock.parse(head)
    if block is not None and block.sound:
        return block
    if not head:
        raise NotARunFileError(f"{path} is empty; a run file is made by keelscope.watch(model, PATH).")
    if head.startswith(superblock.SIGNATURE):
        raise NotARunFileError(f"{path} is HDF5, but not a run file of keelscope, or its first bytes are damaged.")
    raise NotARunFileError(f"{path} is not an HDF5 file; a run file is made by keelscope.watch(model, PATH).")


def _open(path: Path) -> int:
    """Open a regular file, and nothing else, for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise RunNotFoundError(errno.ENOENT, f"There is no run file{_nearest(path)}", str(path)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotARunFileError(
                f"{path} is a symbolic link; open the file it leads to: {os.path.realpath(path)}."
            ) from error
        raise RunFileError(error.errno, f"The run file cannot be read ({error.strerror})", str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        kind = "a folder" if path.is_dir() else "not a regular file"
        raise NotARunFileError(f"{path} is {kind}; give the path of a run file, such as runs/keel.h5.")
    return descriptor


def _nearest(path: Path) -> str:
    """What the user may have meant."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in {".h5", ".hdf5"}]
    except OSError:
        return ""
    near = get_close_matches(path.name, names, n=3, cutoff=0.7)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _first_line(error: Exception) -> str:
    return str(error).strip("'\"").partition("\n")[0]
