"""`RunWriter`: records rows into a run file while training goes on.

It checks and copies rows (`rows`), finds a name (`destination`) and hands the rows to the writer thread (`worker`),
which writes them to one part after the other (`rotation`, `livepart`). `memory.MemoryWriter` does it without a file.
"""

from __future__ import annotations

import errno
import os
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from keelscope.errors import RecordingWarning, RunExistsError, RunFileError, UsageError
from keelscope.store.covered import seen_by
from keelscope.store.destination import Exists, check_exists, claims
from keelscope.store.layout import check_wider
from keelscope.store.pace import Pace
from keelscope.store.reader import Run, open_run
from keelscope.store.rows import RowPacker
from keelscope.store.schema import CoverageEntry, PartInfo, Row, RunLayout
from keelscope.store.sealer import seal_closed_run
from keelscope.store.worker import Worker

__all__ = ["RunWriter"]

_this = SimpleNamespace(pid=os.getpid())
"""The process, which a row is not worth a call of the system to ask for."""
os.register_at_fork(after_in_child=lambda: vars(_this).update(pid=os.getpid()))


class RunWriter:
    """Writes one run file. The file exists, readable by others, as soon as the constructor returns.

    Rows are committed by a thread of its own, 64 at a time or after one second. When the disk is full or gone,
    recording stops with one `RecordingWarning` and training goes on. A forked child never writes. `close` also runs at
    interpreter exit and when the writer is garbage collected. A closed run is sealed, see `sealer`.

    Args:
        path: the file to create; missing parent folders are created.
        layout: everything that will be recorded; its `PartInfo` says which rank writes, and the step of the first row.
        exists: if the name is taken, ``"new"`` uses the next free one (``keel-2.h5``), ``"error"`` refuses,
            ``"resume"`` goes on with the run in a new part.
        pace: how often to commit and how long to wait.
        part: instead of that of the layout. Ranks of one launch find each other's files by what they share in their
            environment, or by a ``session_id`` given here, see `launch`.

    Raises:
        RunExistsError: if the name is taken and ``exists`` is ``"error"``.
        RunFileError: if the file cannot be created.
        UsageError: if the layout cannot be stored.
    """

    def __init__(
        self,
        path: str | Path,
        layout: RunLayout,
        *,
        exists: Exists = "new",
        pace: Pace | None = None,
        part: PartInfo | None = None,
    ) -> None:
        self._packer = RowPacker(layout if part is None else replace(layout, part=part))
        self._pid = _this.pid
        self._warned: set[str] = set()
        self._closed = False
        self._pace, self._changes = pace or Pace(), 0
        try:
            self.path, self._worker = _start(Path(path).expanduser(), self._packer.layout, exists, self._pace)
        except RunFileError:
            raise
        except OSError as error:
            raise RunFileError(
                error.errno, f"The run file cannot be created ({error.strerror or error})", str(path)
            ) from error
        after = (self.path.absolute(), (pace or Pace()).seal)
        self._finalizer = weakref.finalize(self, _close_in_owner, self._worker, self._pid, *after)

    def append(self, row: Row) -> None:
        """Record a row. Copies it and returns; the writer thread stores it.

        Args:
            row: one recorded step, after the step of the row before it.

        Raises:
            UsageError: if it does not fit the layout or the writer is closed.
        """
        if _this.pid != self._pid:
            return
        if self._closed:
            raise UsageError(f"{self.path} is closed; no more rows can be added.")
        self._worker.put(self._packer.pack(row))
        for name in self._packer.unknown_scalars:
            self._warn_once(f"scalar {name!r} is not in the layout and is not recorded in {self.path}.")
        if self._worker.problem:
            self._warn_of_problem()

    def change(self, layout: RunLayout) -> bool:
        """From the next row on, record more: the rows to come go to a new part of the run.

        Args:
            layout: everything there was, in the same places, and something new.

        Returns:
            False if that was done too often (`Pace.changes`); then nothing changes.

        Raises:
            UsageError: if something that was recorded is missing, or the layout cannot be stored.
        """
        packer = RowPacker(layout, self._packer.last)
        check_wider(self._packer.layout, packer.layout)
        if self._changes >= self._pace.changes:
            return False
        self._changes += 1
        self._packer = packer
        return True

    def cover(self, entries: Sequence[CoverageEntry]) -> None:
        """Say what all rows have shown, for when the file is closed; it was created with what the first one showed.

        Args:
            entries: the coverage by now. What it calls observed is so in the file, too.
        """
        self._worker.cover(seen_by(entries))

    def flush(self) -> None:
        """Wait until every appended row can be read by other processes."""
        if os.getpid() != self._pid or self._closed:
            return
        self._worker.flush()
        if self._worker.problem:
            self._warn_of_problem()

    def close(self) -> None:
        """Commit the last rows and close the file. Harmless when repeated."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        problem = self._finalizer()
        if self._worker.problem:
            self._warn_of_problem()
        elif problem:
            self._warn_once(problem)

    def run(self) -> Run:
        """The run recorded so far.

        Returns:
            A `Run` on the file, with every appended row.
        """
        self.flush()
        return open_run(self.path)

    def _warn_of_problem(self) -> None:
        message = f"{self._worker.problem}; training goes on. What was committed can be read."
        self._warn_once(message, key="problem", level=4)

    def _warn_once(self, message: str, key: str = "", level: int = 3) -> None:
        if (key or message) not in self._warned:
            self._warned.add(key or message)
            warnings.warn(message, RecordingWarning, stacklevel=level)


def _start(wanted: Path, layout: RunLayout, exists: Exists, pace: Pace) -> tuple[Path, Worker]:
    check_exists(exists)
    _make_folder(wanted.parent)
    for claim in claims(wanted.absolute(), layout.part, exists):
        try:
            return wanted.with_name(claim.path.name), Worker(claim, layout, pace)
        except FileExistsError:  # somebody who does not lock was faster
            claim.lock.release()
        except BaseException:
            claim.lock.release()
            raise
    raise RunExistsError(errno.EEXIST, "The run is being written by someone else", str(wanted))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFileError(error.errno, "The folder of the run file cannot be created", str(folder)) from error


def _close_in_owner(worker: Worker, pid: int, path: Path, sealing: str) -> str:
    """Close, and seal what was recorded without trouble; returns why that was not possible."""
    if os.getpid() != pid:
        return ""
    worker.close()
    return "" if worker.problem or sealing == "never" else seal_closed_run(path, sealing)
