"""`IsolatedSource`: a run file that another process reads, so that no file can crash or hang this one.

The allow-list refuses what a run file does not hold, but HDF5 itself reads the metadata, and metadata that somebody
forged can make it follow wild pointers or run in circles. One reading process (`serving`) serves all runs of this
process. When it dies or does not answer, it is replaced: the run it was reading is refused, the others open again.
"""

from __future__ import annotations

import atexit
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import (
    NotARunFileError,
    RunFileError,
    RunNotFoundError,
    SeriesNotFoundError,
    UnknownNameError,
    UnsupportedSchemaError,
    UsageError,
)
from keelscope.store.frames import BrokenFrameError, pack, rebuilt, receive, send
from keelscope.store.history import History
from keelscope.store.names import ALL
from keelscope.store.overview import COLUMNS as OVERVIEW_COLUMNS
from keelscope.store.overview import Overview
from keelscope.store.schema import RunLayout

__all__ = ["IsolatedSource"]

PATIENCE: Final = 10.0
"""Seconds until a reading process that does not answer is ended; more for much data."""
START: Final = 60.0
"""Seconds that it may take to start: on a machine with much else to do its imports take long."""
_SLOWEST: Final = 20e6
_MAX_STEPS: Final = 2**30
_ERRORS: Final = {
    kind.__name__: kind
    for kind in (
        NotARunFileError,
        RunFileError,
        RunNotFoundError,
        SeriesNotFoundError,
        UnknownNameError,
        UnsupportedSchemaError,
        UsageError,
    )
}


class _Reader:
    """The reading process of this process, started when it is first needed."""

    def __init__(self) -> None:
        self._lock, self._queue = threading.Lock(), threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self.generation = 0

    def ask(self, message: dict[str, Any], most: int = 0) -> tuple[dict[str, Any], NDArray[np.generic] | None]:
        """Send a request and wait for the answer; a process that does not give one is ended."""
        with self._queue:  # a thread that asks again and again waits behind those that are waiting
            self._lock.acquire()
        try:
            process = self._running()
            if message.pop("generation", self.generation) != self.generation:
                raise _LostError
            try:
                send(process.stdin.fileno(), pack(message))  # type: ignore[union-attr]
                return receive(process.stdout.fileno(), most, PATIENCE + most / _SLOWEST)  # type: ignore[union-attr]
            except (BrokenFrameError, OSError) as error:
                self._end()
                raise BrokenFrameError(str(error)) from error
        finally:
            self._lock.release()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            if self._owner == os.getpid():
                self._end()
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "keelscope.store.serving"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            self.generation += 1
            try:
                receive(self._process.stdout.fileno(), 0, START)  # type: ignore[union-attr]
            except (BrokenFrameError, OSError) as error:
                self._end()
                raise _NotStartedError(str(error)) from error
        return self._process

    def end(self) -> None:
        """End the process."""
        with self._lock:
            if self._owner == os.getpid():
                self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


class _LostError(Exception):
    """The reading process that had opened the run is gone."""


class _NotStartedError(Exception):
    """There is no reading process, which is not the fault of any file."""


_READER = _Reader()
atexit.register(_READER.end)


class IsolatedSource:
    """A `source.RunSource` on a file, read by another process.

    Args:
        path: the run file.

    Raises:
        RunNotFoundError: if there is no such file.
        NotARunFileError: if it is not a run file, is damaged, or HDF5 crashes or hangs on it.
        UnsupportedSchemaError: if a newer major version wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps: dict[str, NDArray[np.int64]] = {}
        self._closed = False
        self._open()

    @property
    def layout(self) -> RunLayout:
        """What is recorded."""
        return self._layout

    @property
    def live(self) -> bool:
        """Whether the file was being written when it was last looked at."""
        return self._live

    @property
    def stopped(self) -> bool:
        """Whether the file had been left by a dead writer when it was last looked at."""
        return self._stopped

    @property
    def history(self) -> History:
        """Sessions, missing ranks, and what could not be read when it was last looked at."""
        return self._history

    def steps(self, group: str) -> NDArray[np.int64]:
        """Committed steps of a group, as of the last refresh.

        Args:
            group: name of the group.

        Returns:
            ``[step]``.
        """
        if group not in self._steps:
            _, found = self._ask({"do": "steps", "group": group}, _MAX_STEPS)
            self._steps[group] = self._array(found, np.int64, -1)
        return self._steps[group].copy()

    def read(self, group: str, name: str, start: int, stop: int, sites: slice = ALL) -> NDArray[np.float64]:
        """Rows of a statistic or scalar.

        Args:
            group: name of the group.
            name: statistic or scalar.
            start: first row.
            stop: row after the last.
            sites: stretch of the site axis of a statistic.

        Returns:
            ``[step, ...]``.
        """
        request = {"do": "read", "group": group, "name": name, "rows": [start, stop], "sites": _plain(sites)}
        _, found = self._ask(request, 8 * self._cells(group, name, start, stop, sites))
        return self._array(found, np.float64, stop - start)

    def observed(self, group: str, start: int, stop: int, sites: slice = ALL, name: str = "") -> NDArray[np.bool_]:
        """Rows of which sites were seen.

        Args:
            group: name of the group.
            start: first row.
            stop: row after the last.
            sites: stretch of the site axis.
            name: a statistic: False where its value is unknown.

        Returns:
            ``[step, site]``.
        """
        request = {"do": "observed", "group": group, "name": name, "rows": [start, stop], "sites": _plain(sites)}
        _, found = self._ask(request, self._cells(group, "", start, stop, sites))
        return self._array(found, np.bool_, stop - start)

    def overview(self, group: str, name: str, factor: int, sites: slice = ALL) -> Overview | None:
        """A statistic in fewer rows, where a sealed file of a long run holds it.

        Args:
            group: name of the group.
            name: statistic.
            factor: rows per bin.
            sites: stretch of the site axis.

        Returns:
            The bins, None if there are none ready made.
        """
        bins = -(-len(self.steps(group)) // max(1, factor))
        request = {"do": "overview", "group": group, "name": name, "factor": factor, "sites": _plain(sites)}
        most, columns = 8 * self._cells(group, name, 0, bins, sites), []
        for column, kind in OVERVIEW_COLUMNS.items():
            answer, found = self._ask({**request, "column": column}, max(most, 8 * bins))
            if not answer.get("has"):
                return None
            columns.append(self._array(found, kind, bins))
        return Overview(*columns)

    def refresh(self) -> bool:
        """Look for new rows.

        Returns:
            True if there are any.
        """
        if self._closed:
            return False
        answer, _ = self._ask({"do": "refresh"})
        self._learn(answer)
        if answer["new"]:
            self._steps.clear()
        return bool(answer["new"])

    def close(self) -> None:
        """Close the file."""
        if not self._closed:
            self._closed = True
            try:
                _READER.ask({"do": "close", "run": self._run, "generation": self._generation})
            except (_LostError, _NotStartedError, BrokenFrameError):
                return

    def _cells(self, group: str, name: str, start: int, stop: int, sites: slice) -> int:
        spec = next((one for one in self._layout.groups if one.name == group), None)
        if spec is None:
            return stop - start
        statistic = next((one for one in spec.statistics if one.name == name), None)
        extra = [len(statistic.coords[dim]) for dim in statistic.dims] if statistic else []
        return (stop - start) * len(range(*sites.indices(len(spec.sites)))) * math.prod(extra)

    def _array(self, found: NDArray[np.generic] | None, dtype: type[Any], rows: int) -> NDArray[Any]:
        if found is None or found.dtype != dtype or (rows >= 0 and len(found) != rows):
            raise self._refused("its reader answers something else than was asked for")
        return found

    def _open(self) -> None:
        answer, _ = self._checked({"do": "open", "path": str(self._path.absolute())}, 0)
        self._run = int(answer.get("run", -1))
        self._learn(answer)
        self._generation = _READER.generation

    def _learn(self, answer: dict[str, Any]) -> None:
        """What the reading process says of the run as a whole; the layout only when it is new."""
        try:
            if "layout" in answer:
                self._layout = rebuilt(RunLayout, answer["layout"])
            self._live, self._stopped = bool(answer["live"]), bool(answer["stopped"])
            self._history = rebuilt(History, answer["history"])
        except (BrokenFrameError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._refused(str(error)) from error

    def _ask(self, message: dict[str, Any], most: int = 0) -> tuple[dict[str, Any], NDArray[np.generic] | None]:
        if self._closed:
            raise UsageError(f"{self._path} was closed; open it again with keelscope.open_run.")
        try:
            return self._judged(*_READER.ask(self._addressed(message), most))
        except (_LostError, _NotStartedError, BrokenFrameError):  # perhaps over another file
            self._open()
            return self._checked(self._addressed(message), most)

    def _addressed(self, message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "run": self._run, "generation": self._generation}

    def _checked(self, message: dict[str, Any], most: int) -> tuple[dict[str, Any], NDArray[np.generic] | None]:
        try:
            return self._judged(*_READER.ask(message, most))
        except (_LostError, BrokenFrameError) as error:
            raise self._refused(f"HDF5 cannot read it ({error})") from error
        except _NotStartedError as error:
            raise RunFileError(
                f"{self._path} was not read: the process that reads run files did not start ({error}); try again where "
                f"`{sys.executable} -m keelscope.store.serving` starts within {START:.0f} s."
            ) from error

    def _judged(
        self, answer: dict[str, Any], array: NDArray[np.generic] | None
    ) -> tuple[dict[str, Any], NDArray[np.generic] | None]:
        if "error" in answer:
            kind = _ERRORS.get(str(answer["error"]), NotARunFileError)
            raise kind(*map(self._told, list(answer.get("about", ()))[:3]))
        if answer.get("damaged"):
            damaged = tuple(str(self._told(sentence)) for sentence in answer["damaged"])
            self._history = replace(self._history, damaged=damaged)
        return answer, array

    def _told(self, part: object) -> object:
        return part.replace(str(self._path.absolute()), str(self._path)) if isinstance(part, str) else part

    def _refused(self, reason: str) -> NotARunFileError:
        return NotARunFileError(f"{self._path} is damaged or made to do harm: {reason}.")


def _plain(sites: slice) -> list[int | None]:
    return [sites.start, sites.stop, sites.step]
