"""The parts that one rank writes, one after the other: which rows go to which, and when the next begins.

A part ends after so many rows, at a certain age, when rows of another layout come, or when its file is gone. The next
is open before the one before it is closed, so no row can be lost in between. Only `worker`'s thread calls it.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from keelscope.store.commit import State
from keelscope.store.covered import Seen
from keelscope.store.destination import Claim
from keelscope.store.livepart import LivePart
from keelscope.store.lock import parts_folder
from keelscope.store.pace import Pace
from keelscope.store.parts import part_path
from keelscope.store.rows import PackedRow
from keelscope.store.schema import PartInfo, RunLayout

__all__ = ["PartWriter", "reason"]

_MIN_FREE = 64 * 2**20
_SOON = 600.0
"""Age at which a part ends that cannot be read before it ends."""


class PartWriter:
    """Writes rows to the parts of one rank.

    Args:
        claim: the run, the first part and the lock.
        layout: what the first rows hold.
        pace: when to begin the next part.

    Raises:
        FileExistsError: if the name of the first part was taken meanwhile.
        OSError: if it cannot be created.
    """

    def __init__(self, claim: Claim, layout: RunLayout, pace: Pace) -> None:
        self._run, self._lock, self._info, self._pace = claim.path, claim.lock, claim.part, pace
        self._age = pace.part_time if pace.live == "swmr" else min(_SOON, pace.part_time)
        self._unpublished: list[LivePart] = []
        self._dropped_before = 0
        self._device = claim.path.parent.stat().st_dev
        self.problem = ""
        """Why a part could not be closed or published; empty while all is well."""
        self.seen: Seen = frozenset()
        """What all rows have observed, for the last part."""
        self.part: LivePart | None = None
        self._begin(layout, claim.part)

    def begin_again(self) -> None:
        """After a failure: give a part up whose file is gone, so that the next row begins another.

        Raises:
            OSError: if the whole disk is gone: it may come back with its files.
        """
        self._check_disk()
        if self.part is not None and not self.part.is_in_place():
            self.part.abandon()
            self.part = None

    def write(self, rows: Sequence[PackedRow], dropped: int) -> int:
        """Commit rows of one layout, as many as the part has room for.

        Args:
            rows: at least one row.
            dropped: rows lost so far.

        Returns:
            How many were committed.

        Raises:
            OSError: if the disk is full or gone; nothing is marked as committed beyond what was.
        """
        part = self._part_for(rows[0], dropped)
        batch = rows[: max(1, self._pace.part_rows - part.committer.rows)]
        _check_space(part.place.parent, 4 * part.committer.growth(len(batch)))
        part.committer.commit(batch)
        if self._pace.fsync == "commit":
            part.sync()
        return len(batch)

    def report(self, state: State, dropped: int) -> None:
        """Renew the status of the open part.

        Args:
            state: what the writer is doing.
            dropped: rows lost so far.

        Raises:
            OSError: if the disk is gone.
        """
        if self.part is not None:
            self.part.committer.report(state, dropped - self._dropped_before)

    def close(self, state: State, dropped: int) -> None:
        """Close and publish whatever is not yet.

        Args:
            state: last entry of the status.
            dropped: rows lost so far.

        Raises:
            OSError: if that could not be done; what was committed is there all the same.
        """
        part, self.part = self.part, None
        try:
            if part is not None:
                self._attempt(lambda: part.committer.cover(self.seen))
                self._end_part(part, state, dropped)
        finally:
            self._publish()

    def _part_for(self, row: PackedRow, dropped: int) -> LivePart:
        if self.part is not None and not self.part.is_in_place():
            raise FileNotFoundError(errno.ENOENT, "its file is gone", str(self.part.place))
        if self.part is None or self._layout is not row.layout:
            return self._next(row, dropped)
        if self.part.committer.rows and self._is_complete(self.part):
            try:
                return self._next(row, dropped)
            except (OSError, RuntimeError):  # the open one does as well
                self._end = time.monotonic() + self._pace.retry
        return self.part

    def _is_complete(self, part: LivePart) -> bool:
        return part.committer.rows >= self._pace.part_rows or time.monotonic() >= self._end

    def _next(self, row: PackedRow, dropped: int) -> LivePart:
        self._check_disk()
        self._lock.renew()
        _check_space(part_path(self._run, self._info.rank, 1).parent, 0)
        before = self.part
        part = self._begin(row.layout, replace(self._info, part=self._free_number(), first_step=row.step))
        if before is not None:
            self._attempt(lambda: self._end_part(before, State.CLOSING, dropped))
            self._dropped_before = dropped  # of a part that is gone, the next one tells
        self._attempt(self._publish)
        return part

    def _free_number(self) -> int:
        number, waiting = self._info.part, {part.path for part in (*self._unpublished, self.part) if part is not None}
        while (path := part_path(self._run, self._info.rank, number)) in waiting or os.path.lexists(path):
            number += 1
        return number

    def _end_part(self, part: LivePart, state: State, dropped: int) -> None:
        if part.scratch is not None:
            self._unpublished.append(part)
        part.close(state, dropped - self._dropped_before)

    def _publish(self) -> None:
        while self._unpublished:
            part = self._unpublished[0]
            try:
                self._check_disk()
                part.publish()
            except OSError as error:
                message = f"{error.strerror or error} (its rows are kept in {part.scratch})"
                raise OSError(error.errno, message, str(part.path)) from error
            del self._unpublished[0]

    def _check_disk(self) -> None:
        """What lies under a mount point is another disk, without the run, and nobody would look for it there."""
        known = self._run.parent.stat().st_dev == self._device
        if not known and not any(map(os.path.lexists, (self._run, parts_folder(self._run)))):
            raise FileNotFoundError(errno.ENOENT, "its disk is gone", str(self._run))

    def _attempt(self, action: Callable[[], None]) -> None:
        """Do something that the rows to come do not depend on."""
        try:
            action()
        except (OSError, RuntimeError) as error:
            self.problem = self.problem or f"a part of {self._run} could not be completed: {reason(error)}"

    def _begin(self, layout: RunLayout, info: PartInfo) -> LivePart:
        path = part_path(self._run, info.rank, info.part)
        in_scratch = self._pace.live == "parts"
        self.part = LivePart(path, replace(layout, part=info), in_scratch=in_scratch)
        self._info, self._layout = info, layout
        self._end = time.monotonic() + self._age
        return self.part


def reason(error: Exception) -> str:
    """What went wrong, in a few words; HDF5 hides them in a report of several lines.

    Args:
        error: what was raised.

    Returns:
        The message of the operating system, if there is one.
    """
    found = re.search(r"error message = '([^']*)'", str(error))
    if found:
        return found[1]
    return (error.strerror if isinstance(error, OSError) else None) or str(error).partition("\n")[0]


def _check_space(folder: Path, n_bytes: int) -> None:
    """Refuse to write into the last free space: running into the end of a disk is what damages files."""
    disk = os.statvfs(folder)
    free, needed = disk.f_bavail * disk.f_frsize, max(_MIN_FREE, n_bytes)
    if free < needed:
        raise OSError(f"only {free / 2**20:.0f} MB are free on its disk, {needed / 2**20:.0f} MB are needed")
