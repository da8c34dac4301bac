"""The process that reads run files for another one (`python -m keelscope.store.serving`); `isolated` starts it.

Answers one request after the other on its standard input and output until they are closed. HDF5 may crash or hang on a
damaged file: then this process is lost, and nothing else.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import KeelscopeError
from keelscope.store.frames import BrokenFrameError, pack, receive, send
from keelscope.store.overview import Overview
from keelscope.store.reader import open_run
from keelscope.store.source import RunSource

__all__ = ["main"]

_LEAST_MEMORY = 4 * 2**30


class _Desk:
    """The runs that are open, by number."""

    def __init__(self) -> None:
        self._sources: dict[int, RunSource] = {}
        self._next = 0
        self._overview_of: tuple[tuple[object, ...], Overview | None] = ((), None)

    def answer(self, request: dict[str, Any]) -> list[memoryview]:
        """What was asked for, or what went wrong."""
        try:
            reply, array = getattr(self, f"_{request.pop('do')}")(**request)
            return pack(reply, array)
        except KeelscopeError as error:
            about = [error.errno, error.strerror, error.filename] if isinstance(error, OSError) else []
            return pack({"error": type(error).__name__, "about": about if any(about) else [str(error)]})
        except Exception as error:  # whatever a damaged file leads to
            return pack({"error": "NotARunFileError", "about": [f"It is damaged: {type(error).__name__}, {error}."]})

    def _open(self, path: str) -> tuple[dict[str, Any], None]:
        source = open_run(Path(path))._source
        self._next += 1
        self._sources[self._next] = source
        return {"run": self._next, "layout": source.layout, **_state(source)}, None

    def _steps(self, run: int, group: str) -> tuple[dict[str, Any], NDArray[np.int64]]:
        return {}, self._sources[run].steps(group)

    def _read(
        self, run: int, group: str, name: str, rows: tuple[int, int], sites: list[int | None]
    ) -> tuple[dict[str, Any], NDArray[np.float64]]:
        found = self._sources[run].read(group, name, *rows, slice(*sites))
        return {"damaged": self._sources[run].history.damaged}, found

    def _observed(
        self, run: int, group: str, name: str, rows: tuple[int, int], sites: list[int | None]
    ) -> tuple[dict[str, Any], NDArray[np.bool_]]:
        found = self._sources[run].observed(group, *rows, slice(*sites), name)
        return {"damaged": self._sources[run].history.damaged}, found

    def _overview(
        self, run: int, group: str, name: str, factor: int, sites: list[int | None], column: str
    ) -> tuple[dict[str, Any], NDArray[np.generic] | None]:
        if self._overview_of[0] != (run, group, name, factor, tuple(sites)):
            found = self._sources[run].overview(group, name, factor, slice(*sites))
            self._overview_of = ((run, group, name, factor, tuple(sites)), found)
        found = self._overview_of[1]
        return {"has": found is not None}, None if found is None else np.ascontiguousarray(getattr(found, column))

    def _refresh(self, run: int) -> tuple[dict[str, Any], None]:
        source = self._sources[run]
        before, new = source.layout, source.refresh()
        self._overview_of = ((), None)
        changed = {} if source.layout is before else {"layout": source.layout}
        return {"new": new, **changed, **_state(source)}, None

    def _close(self, run: int) -> tuple[dict[str, Any], None]:
        self._sources.pop(run).close()
        return {}, None


def _state(source: RunSource) -> dict[str, Any]:
    return {"live": source.live, "stopped": source.stopped, "history": source.history}


def main() -> None:
    """Answer requests until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _bound_memory()
    answers, silent = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in (1, 2):  # HDF5 prints what it thinks of a file
        os.dup2(silent, number)
    desk = _Desk()
    try:
        send(answers, pack({"ready": True}))
        while True:
            request, _ = receive(0)
            send(answers, desk.answer(request))
    except (BrokenFrameError, OSError):
        return


def _bound_memory() -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = max(_LEAST_MEMORY, physical // 2)
    known = [limit for limit in (soft, hard, most) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))


if __name__ == "__main__":
    main()
