"""Says whether the writer of a run file is alive: a locked file in ``NAME.h5.parts/`` for as long as it is.

POSIX record locks (`fcntl.lockf`), because the kernel drops them when the process dies, also by kill -9, and a forked
child does not inherit them. They have one trap: closing any descriptor of the lock file drops the lock of the whole
process, so the process that writes must never open it a second time. It knows itself by the note beside the lock.
`destination` takes the lock; `opening` asks `find_writer`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from enum import Enum
from pathlib import Path

__all__ = ["Writer", "WriterLock", "find_writer", "parts_folder"]

_HEARTBEAT = 30.0
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def parts_folder(path: Path) -> Path:
    """The folder beside a run file that holds its lock (and, in later versions, further parts).

    Args:
        path: the run file.

    Returns:
        ``NAME.h5.parts`` beside it.
    """
    return path.with_name(path.name + ".parts")


class WriterLock:
    """Held by the process that writes a run file, until `release` or its death.

    Args:
        path: the run file.
        rank: which of the processes that record the run.
        sealing: whether it is held to seal the run, and not to record.

    Raises:
        BlockingIOError: if another process holds it.
        OSError: if the folder cannot be written.
    """

    def __init__(self, path: Path, rank: int = 0, *, sealing: bool = False) -> None:
        self._folder = parts_folder(path)
        self._lock, self._note = _lock_name(rank), _note_name(rank)
        self._folder.mkdir(exist_ok=True)
        self._descriptor = os.open(self._folder / self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(self._descriptor, fcntl.LOCK_EX)
        except OSError:
            os.close(self._descriptor)
            raise
        pid, started = _identity(os.getpid())
        (self._folder / self._note).write_text(json.dumps({"pid": pid, "started": started, "sealing": sealing}))

    def release(self) -> None:
        """Give the lock back and remove its files; the folder too if nothing else is in it."""
        for name in (self._note, self._lock):
            (self._folder / name).unlink(missing_ok=True)
        os.close(self._descriptor)
        try:
            self._folder.rmdir()
        except OSError:
            return


class Writer(Enum):
    """Where the writer of a run file is."""

    GONE = "gone"
    HERE = "here"
    PARENT = "parent"
    """The process that started this one, which may have inherited its HDF5 handles."""
    ELSEWHERE = "elsewhere"
    SEALING = "sealing"
    """Nobody writes rows any more; a process merges the parts."""


def find_writer(path: Path, rank: int = 0) -> Writer:
    """Whether some process still writes a run file, and which.

    Args:
        path: the run file, as an absolute path.
        rank: which of the processes that record the run.

    Returns:
        Anything but `Writer.GONE` if its lock is held; where locks do not work, if it changed within the last 30 s.
    """
    folder = parts_folder(path)
    note, sealing = _read_note(folder / _note_name(rank))
    if note == _identity(os.getpid()):
        return Writer.SEALING if sealing else Writer.HERE
    if note == _identity(os.getppid()):
        return Writer.SEALING if sealing else Writer.PARENT
    try:
        descriptor = os.open(folder / _lock_name(rank), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Writer.GONE
    except OSError:
        return _by_heartbeat(path)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        held = Writer.SEALING if sealing else Writer.ELSEWHERE
        return _by_heartbeat(path) if error.errno in _NO_LOCKS else held
    finally:
        os.close(descriptor)
    return Writer.GONE


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _by_heartbeat(path: Path) -> Writer:
    return Writer.ELSEWHERE if time.time() - path.stat().st_mtime < _HEARTBEAT else Writer.GONE


def _lock_name(rank: int) -> str:
    return f"r{rank:05d}.lock"


def _note_name(rank: int) -> str:
    return f"r{rank:05d}.json"


def _read_note(path: Path) -> tuple[tuple[int, int], bool]:
    """Who wrote the note, and whether to seal the run."""
    try:
        note = json.loads(path.read_text())
        return (int(note["pid"]), int(note["started"])), note.get("sealing") is True
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return (-1, -1), False


def _identity(pid: int) -> tuple[int, int]:
    """Process id, and the clock ticks from boot to its start, which tell it from an earlier one of that id."""
    try:
        return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return pid, 0
