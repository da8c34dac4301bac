"""Makes a run file appear under its name in one step, under a free name, and takes its lock.

The file is built under a temporary name and linked to the final one, which fails if that exists: nothing is ever
overwritten, nobody sees half a file, and of several processes that want a name exactly one gets it. Used by `writer`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Literal, TypeAlias

from keelscope.errors import RunExistsError, UsageError
from keelscope.store.lock import Writer, WriterLock, find_writer

__all__ = ["Exists", "publish", "temporary_name"]

Exists: TypeAlias = Literal["new", "error"]
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def temporary_name(path: Path) -> Path:
    """A hidden name beside the run file, different for every process and writer.

    Args:
        path: the run file.

    Returns:
        A path in the same folder.
    """
    return path.with_name(f".keelscope-{os.getpid()}-{os.urandom(4).hex()}.tmp")


def publish(temporary: Path, wanted: Path, exists: Exists) -> tuple[Path, WriterLock]:
    """Give a finished temporary file its final name.

    Args:
        temporary: the file, which loses its temporary name.
        wanted: the name the user asked for.
        exists: ``"new"`` takes the next free of ``keel.h5``, ``keel-2.h5``, ``keel-3.h5``; ``"error"`` refuses.

    Returns:
        The name it got, and the lock that goes with it.

    Raises:
        RunExistsError: if the name is taken and ``exists`` is ``"error"``.
        UsageError: if ``exists`` is anything else.
        OSError: if the folder cannot be written.
    """
    if exists not in {"new", "error"}:
        raise UsageError(f"exists={exists!r} is not known; use 'new' (the next free name) or 'error'.")
    for path in _candidates(wanted):
        lock = _try_name(temporary, path)
        if lock is not None:
            return path, lock
        if exists == "error":
            break
    raise RunExistsError(errno.EEXIST, "The run file exists; give another name or exists='new'", str(wanted))


def _candidates(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in count(2):
        yield wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")


def _try_name(temporary: Path, path: Path) -> WriterLock | None:
    if os.path.lexists(path) or find_writer(path) is not Writer.GONE:
        return None
    try:
        _link(temporary, path)
    except FileExistsError:
        return None
    try:
        return WriterLock(path)
    except OSError:
        path.unlink()
        raise


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
