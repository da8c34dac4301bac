"""The writer thread: takes packed rows from a bounded queue and commits them, and never lets an error reach training.

`writer.RunWriter` owns one. A row is committed when 64 are waiting or the oldest waits for a second. When the disk is
full or gone, recording stops, rows are counted as dropped, and writing is tried again after a minute.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile

from keelscope.store.commit import State
from keelscope.store.covered import Seen
from keelscope.store.destination import Claim
from keelscope.store.pace import Pace
from keelscope.store.rotation import PartWriter, reason
from keelscope.store.rows import PackedRow, settle
from keelscope.store.schema import RunLayout

__all__ = ["WRITING", "Worker"]

_FLUSH_TIMEOUT = 60.0
_LARGEST_BATCH = 64
WRITING: set[int] = set()
"""The threads that write, which train nothing."""
os.register_at_fork(after_in_child=WRITING.clear)


class Worker:
    """Owns the parts that one rank writes, their lock and the thread.

    Args:
        claim: the run, the first part and the lock.
        layout: what the first rows hold.
        pace: when to commit and when to begin the next part.

    Raises:
        FileExistsError: if the name of the first part was taken meanwhile.
        OSError: if it cannot be created.
    """

    def __init__(self, claim: Claim, layout: RunLayout, pace: Pace) -> None:
        self._path, self._lock, self._pace = claim.path, claim.lock, pace
        self._parts = PartWriter(claim, layout, pace)
        self._queue: deque[tuple[float, PackedRow]] = deque()
        self._wake = threading.Condition()
        self._flush_asked = self._closing = self._stalled = False
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

    def cover(self, seen: Seen) -> None:
        """What all rows have shown, to be written when the file is closed."""
        self._parts.seen = seen

    def close(self) -> None:
        """Commit what is waiting, close the file and give the lock back. Harmless when repeated."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(_FLUSH_TIMEOUT)

    def _work(self) -> None:
        WRITING.add(threading.get_ident())
        try:
            while self._wait():
                self._write()
            self._finish()
        finally:
            WRITING.discard(threading.get_ident())

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
            # asked for while the last rows were on their way: those that came since are still to be written
            self._flush_asked = self._flush_asked and bool(self._queue) and self._state is State.LIVE
            self._wake.notify_all()

    def _commit_waiting(self) -> None:
        if self._state is State.STOPPED:
            self._parts.begin_again()
        more = True
        while more:
            batch = self._next_batch()
            done = self._parts.write(batch, self.dropped) if batch else 0
            with self._wake:
                for _ in range(done):
                    self._queue.popleft()
                self._stalled = False
                more = bool(self._queue) and (self._flush_asked or self._closing)
                self._wake.notify_all()
        self._parts.report(State.LIVE, self.dropped)
        self.problem = self.problem or self._parts.problem
        self._state = State.LIVE
        self._beat_at = time.monotonic()

    def _next_batch(self) -> list[PackedRow]:
        """Rows that wait, up to the first of another layout."""
        with self._wake:
            rows = [row for _, row in list(self._queue)[: min(4 * self._pace.batch, _LARGEST_BATCH)]]
        return settle(list(takewhile(lambda row: row.layout is rows[0].layout, rows)))

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run something that writes; on any error stop recording. Training must go on whatever it was."""
        try:
            action()
        except Exception as error:
            with self._wake:
                self._state = State.STOPPED
                self._retry_at = time.monotonic() + self._pace.retry
                self.problem = self.problem or f"recording to {self._path} stopped: {reason(error)}"
                self._wake.notify_all()
            with suppress(OSError, RuntimeError):
                self._parts.report(State.STOPPED, self.dropped)

    def _finish(self) -> None:
        self._guarded(self._commit_waiting)
        with self._wake:
            self.dropped += len(self._queue)
            self._queue.clear()
        final = State.DONE if self._state is State.LIVE else State.STOPPED
        self._guarded(lambda: self._parts.close(final, self.dropped))
        self._guarded(self._lock.release)
        with self._wake:
            self._flush_asked = False
            self._wake.notify_all()

    def _has_room(self) -> bool:
        return len(self._queue) < self._pace.capacity and self._state is State.LIVE

    def _drop(self) -> None:
        self.dropped += 1
        self.problem = self.problem or f"{self._path}: the disk cannot keep up, rows are being lost"
