"""Seals a run: merges its parts into one compressed file that takes the place of the named one.

The file is written under a temporary name, read back and compared with the parts, made durable, and only then renamed
over the named file; the parts are deleted last. Whatever stops it, all rows are where they were before. Nobody is kept
waiting: the locks of the ranks are taken for the moment of renaming only, and if a part has come or changed until then,
for example because training goes on, the sealed file is thrown away. `sealer` calls this when
a run is closed, in a process of its own if it is long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import h5py

from keelscope.errors import KeelscopeError, RunFileError
from keelscope.store.closing import sync_folder
from keelscope.store.filesource import FileSource
from keelscope.store.ledger import part_key
from keelscope.store.lock import Writer, WriterLock, find_writer, locked, noted_ranks, parts_folder
from keelscope.store.parts import find_parts
from keelscope.store.rounding import check_precision
from keelscope.store.runfiles import RunFiles
from keelscope.store.sealedfile import check_equal, logical_bytes, write_sealed

__all__ = ["Outcome", "Sealed", "main", "remove_merged", "seal", "stray_drafts"]

_LOCK = "seal.lock"
_DRAFT = "seal.tmp-"
_NO_PART = 2**30
_IN_MEMORY = 64 * 2**20
_SPARE = 64 * 2**20
_Stamp = dict[Path, tuple[int, int, int]]


class Outcome(Enum):
    """What became of an attempt to seal a run."""

    SEALED = "sealed"
    ALREADY = "already sealed"
    BUSY = "still being written"
    CHANGED = "changed while it was read"
    INCOMPLETE = "not every rank has recorded yet"


@dataclass(frozen=True, slots=True)
class Sealed:
    """An attempt to seal a run."""

    outcome: Outcome
    bytes_before: int = 0
    """Size of all its files."""
    bytes_after: int = 0


def seal(path: Path, precision: str = "exact", *, incomplete: bool = False) -> Sealed:
    """Merge the parts of a run that nobody writes into one file under its name.

    Args:
        path: the named file.
        precision: ``"exact"`` keeps every bit, ``"float32"`` the 24 bits of float32, ``"10bit"`` a relative error of at
            most 2^-11; the range is that of float64 in every case.
        incomplete: also if a rank of the last session has no file. It must not come later: its file would not be read.

    Returns:
        What became of it.

    Raises:
        NotARunFileError: if a part is damaged; nothing is changed.
        RunFileError: if there is no run, or its folder cannot be written.
        OSError: if the disk is full; nothing is changed.
        UsageError: if there is no such precision.
    """
    check_precision(precision)
    path = path.expanduser().absolute()
    if _is_written(path):
        return Sealed(Outcome.BUSY)
    stamp = _stamp(path)
    with ExitStack() as stack:
        run = RunFiles(path, strict=True)
        stack.callback(run.close)
        if run.history.sealed:
            return Sealed(Outcome.ALREADY)
        if not incomplete and _lacks_ranks(run):
            return Sealed(Outcome.INCOMPLETE)
        try:
            draft = stack.enter_context(_drafting(path))
        except BlockingIOError:
            return Sealed(Outcome.BUSY)
        _check_space(path.parent, logical_bytes(run))
        _write(draft, run, precision)
        with _closing(FileSource(draft)) as sealed:
            check_equal(sealed, run, precision)
        before, after = sum(size for _, size, _ in stamp.values()), draft.stat().st_size
        return Sealed(_put(draft, path, stamp), before, after)


def stray_drafts(path: Path) -> list[Path]:
    """Drafts of sealed files that were left when sealing was stopped; they hold nothing that the parts do not.

    Args:
        path: the named file.

    Returns:
        Their names.
    """
    return sorted(parts_folder(path).glob(f"{_DRAFT}*"))


def _is_written(path: Path) -> bool:
    ranks = {0, *(rank for rank, _ in find_parts(path)), *noted_ranks(path)}
    return any(find_writer(path, rank) is not Writer.GONE for rank in ranks)


def _lacks_ranks(run: RunFiles) -> bool:
    """Whether a rank of the last session has no part, so that it may only be late."""
    last = run.history.sessions[-1]
    ranks = {source.layout.part.rank for source in run.sources if source.layout.part.session_id == last.session_id}
    return run.sources[-1].ledger is None and len(ranks) < last.world_size


def _stamp(path: Path) -> _Stamp:
    """Identity, size and time of every file of the run."""
    files = [path, *find_parts(path).values()]
    found = ((file, file.stat()) for file in files if file.exists())
    return {file: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in found}


@contextmanager
def _drafting(path: Path) -> Iterator[Path]:
    """A name for the draft, while no other process seals the run; what earlier ones left is removed."""
    folder = parts_folder(path)
    lock = folder / _LOCK
    descriptor = locked(lock)
    draft = folder / f"{_DRAFT}{os.getpid()}"
    try:
        for stray in stray_drafts(path):
            stray.unlink(missing_ok=True)
        yield draft
    finally:
        draft.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)
        _remove_if_empty(folder)


def _write(draft: Path, run: RunFiles, precision: str) -> None:
    """Write and make durable. What fits is put together in memory: a full disk then cannot upset HDF5."""
    small = logical_bytes(run) <= _IN_MEMORY
    options = {"driver": "core", "backing_store": False} if small else {}
    with h5py.File(draft, "x", libver=("v110", "v110"), track_order=True, locking=False, **options) as file:
        write_sealed(file, run, precision)
        file.flush()
        image = file.id.get_file_image() if small else b""
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if small else 0)
    descriptor = os.open(draft, flags, 0o666)
    try:
        rest = memoryview(image)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(draft: Path, path: Path, stamp: _Stamp) -> Outcome:
    """Rename the draft over the named file and delete the parts, unless something has changed."""
    ranks = {0, *(rank for rank, _ in find_parts(path)), *noted_ranks(path)}
    with ExitStack() as stack:
        try:
            for rank in sorted(ranks):
                stack.callback(WriterLock(path, rank, first_part=_NO_PART, sealing=True).release)
        except BlockingIOError:
            return Outcome.BUSY
        if _stamp(path) != stamp:
            return Outcome.CHANGED
        draft.replace(path)
        sync_folder(path.parent)
        for part in stamp.keys() - {path}:  # every one of them was read, or is known to the sealed file
            part.unlink()
    return Outcome.SEALED


def remove_merged(path: Path) -> list[Path]:
    """Delete parts that a sealed file holds, left when sealing was stopped. The locks of their ranks must be held.

    Args:
        path: the sealed file.

    Returns:
        What was deleted.
    """
    with _closing(FileSource(path)) as sealed:
        merged = sealed.ledger.parts if sealed.ledger is not None else frozenset()
    gone = []
    for part in find_parts(path).values():
        try:
            with _closing(FileSource(part)) as source:
                known = part_key(source.layout.part) in merged
        except RunFileError:
            known = False
        if known:
            part.unlink()
            gone.append(part)
    return gone


@contextmanager
def _closing(source: FileSource) -> Iterator[FileSource]:
    try:
        yield source
    finally:
        source.close()


def _check_space(folder: Path, needed: int) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < needed + _SPARE:
        raise OSError(f"only {free / 2**20:.0f} MB are free on its disk, sealing needs {needed / 2**20 + 64:.0f} MB")


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def main(arguments: Sequence[str]) -> int:
    """What the process that `sealer` starts does: seal a run at the lowest priority.

    Args:
        arguments: the run and the precision.

    Returns:
        0 if the run is sealed, 1 if it is left as it was.
    """
    os.nice(19)
    try:
        done = seal(Path(arguments[0]), arguments[1])
    except (KeelscopeError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201  # nobody else will say it
        return 1
    return 0 if done.outcome in {Outcome.SEALED, Outcome.ALREADY} else 1
