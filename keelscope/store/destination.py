"""Chooses the name of a run and takes the lock of a rank in it, so that nothing is ever overwritten.

Of several processes that want a name exactly one gets it: the lock comes first, then the file appears under its name in
one step, which fails if the name is taken. Ranks of one launch do not talk to each other and still meet: a name is
free for a rank if everything there was written by ranks of its own session, see `launch`. Used by `writer`.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Literal, TypeAlias

from keelscope.errors import RunExistsError, RunFileError, UsageError
from keelscope.store.filesource import FileSource
from keelscope.store.launch import session_id
from keelscope.store.lock import Note, Writer, WriterLock, find_writer, note_of, noted_ranks
from keelscope.store.parts import find_parts
from keelscope.store.schema import PartInfo

__all__ = ["EXISTS", "Claim", "Exists", "check_exists", "claims", "expected", "is_being_written", "is_left"]

Exists: TypeAlias = Literal["new", "error", "resume"]
EXISTS = ("new", "error", "resume")
_PATIENCE = 1.0
_PAUSE = 0.01
_CLOCKS_DIFFER = 5.0
_BEGUN = time.time()


@dataclass(frozen=True, slots=True)
class Claim:
    """A run that a rank may write to."""

    path: Path
    part: PartInfo
    """The first part of this session, with everything but the layout decided."""
    lock: WriterLock


def check_exists(exists: str) -> None:
    """Refuse a word that `claims` does not know.

    Args:
        exists: what to do if the run exists.

    Raises:
        UsageError: if it is none of ``"new"``, ``"error"`` and ``"resume"``.
    """
    if exists not in EXISTS:
        raise UsageError(
            f"exists={exists!r} is not known; use 'new' (the next free name), 'error' or 'resume' (go on with the run)."
        )


def claims(wanted: Path, part: PartInfo, exists: Exists) -> Iterator[Claim]:
    """Names that a rank may write to, best first; the lock of each is held when it is given out.

    Args:
        wanted: the name the user asked for, as an absolute path.
        part: rank, world size and first step; an empty session id is filled in.
        exists: ``"new"`` takes the next free of ``keel.h5``, ``keel-2.h5``, ``keel-3.h5``; ``"error"`` refuses a taken
            one; ``"resume"`` goes on with it.

    Yields:
        Claims. Who asks for the next must have given back the lock of the one before.

    Raises:
        RunExistsError: if the name is taken and ``exists`` is ``"error"``, or another process still writes it.
        UsageError: if ``exists`` is anything else.
        OSError: if the folder cannot be written.
    """
    check_exists(exists)
    part = replace(part, session_id=part.session_id or session_id(str(wanted), part.world_size))
    if exists == "resume":
        yield _resumed(wanted, part)
        return
    for path in _candidates(wanted) if exists == "new" else [wanted]:
        claim = _claimed(path, replace(part, resumed_at_step=-1)) if _is_free(path, part, mine=False) else None
        if claim is not None and _is_free(path, part, mine=True):
            yield claim
        elif claim is not None:
            claim.lock.release()
    raise RunExistsError(errno.EEXIST, "The run file exists; give another name or exists='new'", str(wanted))


def is_being_written(path: Path, rank: int = 0) -> bool:
    """Whether a live process writes or seals the parts of a rank.

    Args:
        path: the run file, as an absolute path.
        rank: whose parts.

    Returns:
        True also where that process is this one.
    """
    return find_writer(path, rank) is not Writer.GONE


def is_left(path: Path, rank: int = 0, patience: float = 60.0) -> bool:
    """Wait until nobody writes a run any more, as after the end of the training before.

    Args:
        path: the run file, as an absolute path.
        rank: the rank that wants to go on with it.
        patience: how long a process that seals the run may take, in seconds; one that still records is given 1.

    Returns:
        False if somebody still does.
    """
    begun = time.monotonic()
    while (writer := find_writer(path, rank)) is not Writer.GONE:
        if time.monotonic() > begun + (patience if writer is Writer.SEALING else _PATIENCE):
            return False
        time.sleep(_PAUSE)
    return True


def expected(wanted: Path, exists: str) -> Path:
    """The name that a run of one process would get if it began now; another process may be faster.

    Args:
        wanted: the name the user asked for, as an absolute path.
        exists: what to do if the run exists.

    Returns:
        The name.
    """
    names = _candidates(wanted) if exists == "new" else iter([wanted])
    return next((path for path in names if not _files(path) and not is_being_written(path)), wanted)


def _candidates(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in count(2):
        yield wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")


def _resumed(path: Path, part: PartInfo) -> Claim:
    claim = _claimed(path, part) if is_left(path, part.rank, _PATIENCE) else None
    if claim is None:
        message = "The run is still being written; end that process, or take exists='new'"
        raise RunExistsError(errno.EEXIST, message, str(path))
    return claim


def _claimed(path: Path, part: PartInfo) -> Claim | None:
    """The lock of a rank, with the number of its next part and the step from which earlier rows are overtaken."""
    files = _files(path)
    number = 1 + max((found for rank, found in files if rank == part.rank), default=-1)
    earlier = any(not _is_of(path, rank, found, part) for rank, found in files)
    resumed_at = max(part.resumed_at_step, part.first_step) if earlier else -1
    try:
        lock = WriterLock(path, part.rank, session=part.session_id, first_part=number)
    except BlockingIOError:
        return None
    return Claim(path, replace(part, part=number, resumed_at_step=resumed_at), lock)


def _is_free(path: Path, part: PartInfo, *, mine: bool) -> bool:
    """Whether a rank may begin a run of that name: all that is there belongs to other ranks of its session."""
    files = _files(path)
    if any(rank == part.rank or not _is_of(path, rank, number, part) for rank, number in files):
        return False
    others = set(noted_ranks(path)) - {rank for rank, _ in files} - ({part.rank} if mine else set())
    return all(_may_join(path, rank, part) for rank in others)


def _may_join(path: Path, rank: int, part: PartInfo) -> bool:
    """Whether a rank that has a lock, but no file yet, is dead or of the same session; it may still write its note."""
    end = time.monotonic() + _PATIENCE
    while is_being_written(path, rank):
        note = note_of(path, rank)
        if note != Note() or time.monotonic() > end:
            return note.session == part.session_id and rank != part.rank
        time.sleep(_PAUSE)
    return True


def _files(path: Path) -> dict[tuple[int, int], Path]:
    return ({(0, 0): path} if os.path.lexists(path) else {}) | find_parts(path)


def _is_of(path: Path, rank: int, number: int, part: PartInfo) -> bool:
    """Whether a part was made by another rank of that session, which may be through with it already."""
    note = note_of(path, rank)
    if note.session == part.session_id and note.first_part <= number and is_being_written(path, rank):
        return True
    return part.world_size > 1 and _was_just_made(_files(path).get((rank, number), path), part.session_id)


def _was_just_made(file: Path, session: str) -> bool:
    """Whether a file says that it is of that session. A launcher may use its names again, so an old file is not."""
    try:
        with closing(FileSource(file)) as source:
            layout = source.layout
        created = datetime.fromisoformat(layout.info.created_at).timestamp()
    except (RunFileError, ValueError):
        return False
    return layout.part.session_id == session and created > _BEGUN - _CLOCKS_DIFFER
