"""The writer thread: takes packed rows from a bounded queue and commits them, and never lets an error reach training.

`writer.RunWriter` owns one. A row is committed when 16 are waiting or the oldest waits for a second. When the disk is
full or gone, recording stops, rows are counted as dropped, and writing is tried again after a minute.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py

from keelscope.store.closing import close_file
from keelscope.store.commit import Committer, State
from keelscope.store.lock import WriterLock
from keelscope.store.rows import PackedRow

__all__ = ["Pace", "Worker"]

_MIN_FREE = 64 * 2**20
_FLUSH_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class Pace:
    """When rows are committed and how long anything may wait; times in seconds."""

    batch: int = 16
    delay: float = 1.0
    capacity: int = 256
    patience: float = 1.0
    """How long `Worker.put` waits for room in the queue before the row is dropped."""
    retry: float = 60.0
    heartbeat: float = 10.0


class Worker:
    """Owns the open file, its lock and the thread; one per run file.

    Args:
        file: the run file, in SWMR mode.
        path: its name.
        lock: its lock.
        committer: writes to it.
        pace: when to commit.
    """

    def __init__(self, file: h5py.File, path: Path, lock: WriterLock, committer: Committer, pace: Pace) -> None:
        self._file, self._path, self._lock, self._committer, self._pace = file, path, lock, committer, pace
        self._queue: deque[tuple[float, PackedRow]] = deque()
        self._wake = threading.Condition()
        self._flush_asked = self._closing = self._stalled = False
        self._descriptor = int(file.id.get_vfd_handle())
        self._state = State.LIVE
        self._retry_at = self._beat_at = time.monotonic()
        self.dropped = 0
        self.problem = ""
        """Why recording stopped or rows were lost, in a sentence; empty while all is well."""
        self._thread = threading.Thread(target=self._work, name="keelscope-writer", daemon=True)
        self._thread.start()

    def put(self, row: PackedRow) -> None:
        """Hand a row over. Waits for room at most `Pace.patience` seconds, once per stall.

        Args:
            row: the row; dropped and counted if recording has stopped or the disk cannot keep up.
        """
        with self._wake:
            if len(self._queue) >= self._pace.capacity and self._state is State.LIVE and not self._stalled:
                self._wake.wait_for(self._has_room, self._pace.patience)
            if not self._has_room():
                self._stalled = True
                self._drop()
                return
            self._queue.append((time.monotonic(), row))
            if len(self._queue) in {1, self._pace.batch}:
                self._wake.notify_all()

    def flush(self) -> None:
        """Wait until every row put so far is committed, or recording has stopped."""
        with self._wake:
            self._flush_asked = self._thread.is_alive()
            self._wake.notify_all()
            self._wake.wait_for(lambda: not self._flush_asked, _FLUSH_TIMEOUT)

    def close(self) -> None:
        """Commit what is waiting, close the file and give the lock back. Harmless when repeated."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_FLUSH_TIMEOUT)

    def disarm(self) -> None:
        """In a forked child: make every write that HDF5 may still do to the parent's file go nowhere.

        Without this, a child that ends normally closes the file and clears the flag that says it is being written.
        """
        if self._descriptor >= 0:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, self._descriptor)
            os.close(nowhere)

    def _work(self) -> None:
        while self._wait():
            self._write()
        self._finish()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when closing."""
        with self._wake:
            while not self._closing and not self._due():
                self._wake.wait(self._pause())
            return not self._closing

    def _due(self) -> bool:
        now = time.monotonic()
        if self._state is State.STOPPED:
            return self._flush_asked or now >= self._retry_at
        if self._flush_asked or len(self._queue) >= self._pace.batch or now >= self._beat_at + self._pace.heartbeat:
            return True
        return bool(self._queue) and now >= self._queue[0][0] + self._pace.delay

    def _pause(self) -> float:
        """Seconds to the next moment at which `_due` can become true by itself."""
        now = time.monotonic()
        if self._state is State.STOPPED:
            return max(0.0, self._retry_at - now)
        beat = self._beat_at + self._pace.heartbeat
        return max(0.0, min(beat, self._queue[0][0] + self._pace.delay if self._queue else beat) - now)

    def _write(self) -> None:
        if self._state is State.LIVE or time.monotonic() >= self._retry_at:
            self._guarded(self._commit_waiting)
        with self._wake:
            self._flush_asked = False
            self._wake.notify_all()

    def _commit_waiting(self) -> None:
        while True:
            with self._wake:
                batch = [row for _, row in list(self._queue)[: 4 * self._pace.batch]]
            if batch:
                self._check_space(len(batch))
                self._committer.commit(batch)
            with self._wake:
                for _ in batch:
                    self._queue.popleft()
                self._stalled = False
                more = bool(self._queue) and (self._flush_asked or self._closing)
                self._wake.notify_all()
            if not more:
                break
        self._committer.report(State.LIVE, self.dropped)
        self._state = State.LIVE
        self._beat_at = time.monotonic()

    def _check_space(self, n_rows: int) -> None:
        """Refuse to write into the last free space: running into the end of a disk is what damages files."""
        disk = os.statvfs(self._path.parent)
        free = disk.f_bavail * disk.f_frsize
        needed = max(_MIN_FREE, 4 * self._committer.growth(n_rows))
        if free < needed:
            raise OSError(f"only {free / 2**20:.0f} MB are free on its disk, {needed / 2**20:.0f} MB are needed")

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run something that writes; on any error stop recording. Training must go on whatever it was."""
        try:
            action()
        except Exception as error:
            with self._wake:
                self._state = State.STOPPED
                self._retry_at = time.monotonic() + self._pace.retry
                self.problem = self.problem or f"recording to {self._path} stopped: {_reason(error)}"
                self._wake.notify_all()

    def _finish(self) -> None:
        self._guarded(self._commit_waiting)
        with self._wake:
            self.dropped += len(self._queue)
            self._queue.clear()
        final = State.DONE if self._state is State.LIVE else State.STOPPED
        self._guarded(self._committer.trim)
        self._guarded(lambda: self._committer.report(final, self.dropped))
        self._guarded(self._close)
        self._guarded(self._lock.release)
        with self._wake:
            self._flush_asked = False
            self._wake.notify_all()

    def _close(self) -> None:
        self._descriptor = -1
        close_file(self._file, self._path)

    def _has_room(self) -> bool:
        return len(self._queue) < self._pace.capacity and self._state is State.LIVE

    def _drop(self) -> None:
        self.dropped += 1
        self.problem = self.problem or f"{self._path}: the disk cannot keep up, rows are being lost"


def _reason(error: Exception) -> str:
    """What went wrong, in a few words; HDF5 hides them in a report of several lines."""
    found = re.search(r"error message = '([^']*)'", str(error))
    if found:
        return found[1]
    return (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
