"""`RunWriter`: records rows into a run file while training goes on.

It checks and copies rows (`rows`), creates the file (`encoding`, `destination`) and hands the rows to the writer thread
(`worker`). `memory.MemoryWriter` is the same without a file.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import h5py

from keelscope.errors import RecordingWarning, RunFileError, UsageError
from keelscope.store.commit import Committer
from keelscope.store.destination import Exists, publish, temporary_name
from keelscope.store.encoding import create_objects
from keelscope.store.reader import Run, open_run
from keelscope.store.rows import RowPacker
from keelscope.store.schema import Row, RunLayout
from keelscope.store.worker import Pace, Worker

__all__ = ["RunWriter"]


class RunWriter:
    """Writes one run file. The file exists, readable by others, as soon as the constructor returns.

    Rows are committed by a thread of its own, 16 at a time or after one second. When the disk is full or gone,
    recording stops with one `RecordingWarning` and training goes on. A forked child never writes. `close` also runs at
    interpreter exit and when the writer is garbage collected.

    Args:
        path: the file to create; missing parent folders are created.
        layout: everything that will be recorded.
        exists: if the name is taken, ``"new"`` uses the next free one (``keel-2.h5``), ``"error"`` refuses.
        pace: how often to commit and how long to wait.

    Raises:
        RunExistsError: if the name is taken and ``exists`` is ``"error"``.
        RunFileError: if the file cannot be created.
        UsageError: if the layout cannot be stored.
    """

    def __init__(
        self, path: str | Path, layout: RunLayout, *, exists: Exists = "new", pace: Pace | None = None
    ) -> None:
        self._packer = RowPacker(layout)
        self._pid = os.getpid()
        self._warned: set[str] = set()
        self._closed = False
        try:
            self.path, self._worker = _start(Path(path).expanduser(), self._packer.layout, exists, pace or Pace())
        except RunFileError:
            raise
        except OSError as error:
            raise RunFileError(
                error.errno, f"The run file cannot be created ({error.strerror or error})", str(path)
            ) from error
        self._finalizer = weakref.finalize(self, _close_in_owner, self._worker, self._pid)
        os.register_at_fork(after_in_child=_disarmer(self._worker))

    def append(self, row: Row) -> None:
        """Record a row. Copies it and returns; the writer thread stores it.

        Args:
            row: one recorded step, after the step of the row before it.

        Raises:
            UsageError: if it does not fit the layout or the writer is closed.
        """
        if os.getpid() != self._pid:
            return
        if self._closed:
            raise UsageError(f"{self.path} is closed; no more rows can be added.")
        self._worker.put(self._packer.pack(row))
        for name in self._packer.unknown_scalars:
            self._warn_once(
                f"scalar {name!r} was not logged on the first recorded step and is not recorded in {self.path}."
            )
        if self._worker.problem:
            self._warn_of_problem()

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
        self._finalizer()
        if self._worker.problem:
            self._warn_of_problem()

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
    _make_folder(wanted.parent)
    temporary = temporary_name(wanted.absolute())
    file = h5py.File(temporary, "x", libver=("v110", "v110"), rdcc_nbytes=0, track_order=True, locking=False)
    try:
        create_objects(file, layout)
        file.flush()
        file.swmr_mode = True
        file.flush()
        committer = Committer(file, layout)
        path, lock = publish(temporary, wanted.absolute(), exists)
    except BaseException:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return wanted.with_name(path.name), Worker(file, path, lock, committer, pace)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFileError(error.errno, "The folder of the run file cannot be created", str(folder)) from error


def _close_in_owner(worker: Worker, pid: int) -> None:
    if os.getpid() == pid:
        worker.close()


def _disarmer(worker: Worker) -> Callable[[], None]:
    reference = weakref.ref(worker)

    def disarm() -> None:
        alive = reference()
        if alive is not None:
            alive.disarm()

    return disarm
