"""Says whether the writer of a run is alive: one locked file per rank in ``NAME.h5.parts/`` for as long as it is.

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
import re
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

__all__ = [
    "Note",
    "Writer",
    "WriterLock",
    "find_writer",
    "identity",
    "locked",
    "note_of",
    "noted_ranks",
    "parts_folder",
]

_HEARTBEAT = 30.0
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_LOCK_NAME = re.compile(r"r(\d{5})\.(?:lock|json)")


def parts_folder(path: Path) -> Path:
    """The folder beside a run file that holds its locks and its further parts.

    Args:
        path: the run file.

    Returns:
        ``NAME.h5.parts`` beside it.
    """
    return path.with_name(path.name + ".parts")


@dataclass(frozen=True, slots=True)
class Note:
    """What the writer of a rank tells the others."""

    pid: int = -1
    started: int = -1
    """Clock ticks from boot to its start, which tell it from an earlier process of that id."""
    session: str = ""
    """The session it records, the same for all ranks of one launch."""
    first_part: int = 0
    """Number of its first part; earlier ones are of earlier sessions."""
    sealing: bool = False
    """Whether it merges the parts, and writes no rows."""


class WriterLock:
    """Held by the process that writes the parts of one rank, until `release` or its death.

    Args:
        path: the run file.
        rank: whose parts it writes.
        session: the session they belong to.
        first_part: the first part it will write.
        sealing: whether it is held to seal the run, and not to record.

    Raises:
        BlockingIOError: if another process holds it.
        OSError: if the folder cannot be written.
    """

    def __init__(
        self, path: Path, rank: int = 0, *, session: str = "", first_part: int = 0, sealing: bool = False
    ) -> None:
        self._folder = parts_folder(path)
        self._lock, self._note = self._folder / _lock_name(rank), self._folder / _note_name(rank)
        self._descriptor = -1
        try:
            self._descriptor = locked(self._lock)
            self.note = Note(*identity(os.getpid()), session, first_part, sealing)
            self._tell()
        except OSError:
            self._let_go()
            raise

    def renew(self) -> None:
        """Take the lock again if its folder was removed meanwhile.

        Raises:
            BlockingIOError: if another process has taken it.
            OSError: if the folder cannot be written.
        """
        if _is_at(self._descriptor, self._lock):
            return
        before, self._descriptor = self._descriptor, locked(self._lock)
        os.close(before)
        self._tell()

    def _tell(self) -> None:
        """Write the note, whole or not at all."""
        draft = self._note.with_suffix(f".{os.getpid()}-{os.urandom(4).hex()}.tmp")
        draft.write_text(json.dumps(asdict(self.note)))
        draft.replace(self._note)

    def release(self) -> None:
        """Give the lock back and remove its files; the folder too if nothing else is in it."""
        if self._descriptor >= 0:
            for name in (self._note, self._lock):
                name.unlink(missing_ok=True)
        self._let_go()

    def _let_go(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
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


def find_writer(path: Path, rank: int = 0, part: int | None = None) -> Writer:
    """Whether some process still writes the parts of a rank, and which.

    Args:
        path: the run file, as an absolute path.
        rank: whose parts.
        part: the part asked about; a writer does not write the parts of earlier sessions.

    Returns:
        Anything but `Writer.GONE` if its lock is held; where locks do not work, if it changed within the last 30 s.
    """
    note = note_of(path, rank)
    if part is not None and note.first_part > part:
        return Writer.GONE
    if (note.pid, note.started) == identity(os.getpid()):
        found = Writer.HERE
    elif (note.pid, note.started) == identity(os.getppid()):
        found = Writer.PARENT
    else:
        found = _holder(path, rank)
    return Writer.SEALING if note.sealing and found is not Writer.GONE else found


def _holder(path: Path, rank: int) -> Writer:
    """Whether another process holds the lock; asked by opening it, which this process may not do with its own."""
    try:
        descriptor = os.open(parts_folder(path) / _lock_name(rank), os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return Writer.GONE
    except OSError:
        return _by_heartbeat(path, rank)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return _by_heartbeat(path, rank) if error.errno in _NO_LOCKS else Writer.ELSEWHERE
    finally:
        os.close(descriptor)
    return Writer.GONE


def note_of(path: Path, rank: int = 0) -> Note:
    """What the writer of a rank, alive or dead, has told.

    Args:
        path: the run file.
        rank: whose writer.

    Returns:
        Its note; an empty one if there is none that can be read.
    """
    try:
        found = json.loads((parts_folder(path) / _note_name(rank)).read_text())
        session, first_part = str(found.get("session", "")), int(found.get("first_part", 0))
        return Note(int(found["pid"]), int(found["started"]), session, first_part, found.get("sealing") is True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Note()


def noted_ranks(path: Path) -> list[int]:
    """Ranks that have a lock or a note, whether anybody holds it or not.

    Args:
        path: the run file.

    Returns:
        Their numbers in order.
    """
    try:
        names = [entry.name for entry in parts_folder(path).iterdir()]
    except OSError:
        return []
    return sorted({int(found[1]) for name in names if (found := _LOCK_NAME.fullmatch(name))})


def _lock_name(rank: int) -> str:
    return f"r{rank:05d}.lock"


def _note_name(rank: int) -> str:
    return f"r{rank:05d}.json"


def locked(path: Path) -> int:
    """Take a lock; its file is made again if the last holder removed it meanwhile.

    Args:
        path: the lock file.

    Returns:
        A descriptor; closing it gives the lock back.

    Raises:
        BlockingIOError: if another process holds it.
        OSError: if the folder cannot be written.
    """
    while True:
        path.parent.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _by_heartbeat(path: Path, rank: int) -> Writer:
    files = [*([] if rank else [path]), *parts_folder(path).glob(f"r{rank:05d}.p*.h5")]
    changed = [_changed_at(file) for file in files]
    return Writer.ELSEWHERE if time.time() - max(changed, default=0.0) < _HEARTBEAT else Writer.GONE


def _changed_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def identity(pid: int) -> tuple[int, int]:
    """Process id, and the clock ticks from boot to its start, which tell it from an earlier one of that id.

    Args:
        pid: the process.

    Returns:
        Both numbers; 0 ticks where they cannot be found out.
    """
    try:
        return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return pid, 0
