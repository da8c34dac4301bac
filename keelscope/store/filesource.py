"""`FileSource`: serves a `Run` from a run file, in whatever state the file is.

`opening` opens the file, `decoding` reads the layout, `allowlist` every dataset. Rows count as recorded up to the
commit marker ``step``, so a batch that was being written when the process died is not shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.errors import NotARunFileError, RunFileError, RunNotFoundError, UnsupportedSchemaError, UsageError
from keelscope.store.allowlist import RefusedError, child_dataset, child_group
from keelscope.store.chunks import read_block
from keelscope.store.decoding import check_schema, read_layout, scalar_names
from keelscope.store.extras import Extras
from keelscope.store.history import History
from keelscope.store.ledger import Ledger, read_ledger
from keelscope.store.names import ALL, OBSERVED, STEP, WALL_TIME
from keelscope.store.opening import FileState, file_state, open_file
from keelscope.store.overview import Overview
from keelscope.store.schema import SCALARS, RunLayout
from keelscope.store.view import ClosedView

__all__ = ["FileSource"]

_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, OverflowError)
_MAX_READ = 16 * 2**30
_ATTEMPTS = 5
_PAUSE = 0.02
_T = TypeVar("_T")


class FileSource:
    """A `source.RunSource` on a file.

    Args:
        path: the run file, or one of its parts.

    Raises:
        RunNotFoundError: if there is no such file.
        NotARunFileError: if it is not a run file or is damaged.
        UnsupportedSchemaError: if a newer major version wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = _open(path)
        self._steps = self._steadily(_Handle.committed, "its steps")

    @property
    def layout(self) -> RunLayout:
        """What is recorded."""
        return self._handle.layout

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def ledger(self) -> Ledger | None:
        """How the file was made, if it is a sealed one."""
        return self._handle.ledger

    @property
    def extras(self) -> Extras:
        """What the file holds beside the run."""
        handle = self._handle
        return Extras(self._path, handle.file, handle.view.peek, handle.layout)

    @property
    def history(self) -> History:
        """The sessions that a sealed file is made of."""
        ledger = self._handle.ledger
        return History() if ledger is None else History(ledger.sessions, ledger.absences, sealed=True)

    @property
    def live(self) -> bool:
        """Whether the file was being written when it was last looked at."""
        return self._handle.state in {FileState.LIVE, FileState.LIVE_HERE}

    @property
    def stopped(self) -> bool:
        """Whether the file had been left by a dead writer when it was last looked at."""
        return self._handle.state is FileState.DEAD

    def steps(self, group: str) -> NDArray[np.int64]:
        """Committed steps of a group, as of the last refresh.

        Args:
            group: name of the group.

        Returns:
            ``[step]``.
        """
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
        return self._slice(group, name, start, stop, sites).astype(np.float64, copy=False)

    def observed(self, group: str, start: int, stop: int, sites: slice = ALL, name: str = "") -> NDArray[np.bool_]:
        """Rows of which sites were seen.

        Args:
            group: name of the group.
            start: first row.
            stop: row after the last.
            sites: stretch of the site axis.
            name: a statistic: False where its value is unknown because a rank is missing.

        Returns:
            ``[step, site]``.
        """
        seen = self._slice(group, OBSERVED, start, stop, sites).astype(np.bool_)
        unknown = self._handle.unknown.get(group, {}).get(name)
        if unknown is not None:
            seen &= ~unknown[start:stop, None]
        return seen

    def _slice(self, group: str, name: str, start: int, stop: int, sites: slice) -> NDArray[np.generic]:
        if not self._handle.file:
            raise UsageError(f"{self._path} was closed; open it again with keelscope.open_run.")
        dataset = self._handle.datasets[group][name]
        wide = len(range(*sites.indices(dataset.shape[1]))) if dataset.ndim > 1 else 1
        size = (stop - start) * wide * math.prod(dataset.shape[2:]) * dataset.dtype.itemsize
        if size > _MAX_READ:
            raise UsageError(f"{group}/{name}: {size / 2**30:.0f} GB at once is too much; read fewer rows at a time.")
        place = (slice(start, stop), sites)[: dataset.ndim]

        def read(handle: _Handle) -> NDArray[np.generic]:
            return read_block(handle.datasets[group][name], place, handle.view.peek)

        try:
            return self._steadily(read, f"{group}/{name}")
        except MemoryError as error:
            raise UsageError(f"{group}/{name} does not fit into memory; read fewer rows at a time.") from error

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
        return self.extras.overview(group, name, factor, sites) if self.ledger is not None else None

    def refresh(self) -> bool:
        """Look for new rows.

        Returns:
            True if there are any.
        """
        old = self._handle
        if old.state is FileState.CLOSED or not old.file:
            return False
        before = {name: len(steps) for name, steps in self._steps.items()}
        state = file_state(self._path)
        if self.live:
            self._steps = self._steadily(_Handle.refreshed, "new rows")
            self._handle = replace(self._handle, state=state)
        elif state is not FileState.DEAD or old.state is not state:
            self._reopen()
            self._steps = self._steadily(_Handle.committed, "its steps")
        return before != {name: len(steps) for name, steps in self._steps.items()}

    def close(self) -> None:
        """Close the file."""
        self._handle.close()

    def _reopen(self) -> None:
        self._handle.close()
        self._handle = _open(self._path, self._handle.layout)

    def _steadily(self, fetch: Callable[[_Handle], _T], what: str, attempts: int = _ATTEMPTS) -> _T:
        """Read, once more if a commit of the writer was met half way: HDF5 then sees a checksum that does not fit."""
        try:
            return fetch(self._handle)
        except _DAMAGE as error:
            if attempts == 1 or not self.live:
                raise NotARunFileError(f"{self._path} is damaged: {what} cannot be read ({error}).") from error
        time.sleep(_PAUSE)
        self._reopen()
        return self._steadily(fetch, what, attempts - 1)


@dataclass(frozen=True, slots=True)
class _Handle:
    """An open run file and its datasets, every one of them checked."""

    state: FileState
    file: h5py.File
    view: ClosedView
    layout: RunLayout
    datasets: Mapping[str, Mapping[str, h5py.Dataset]]
    steps: Mapping[str, h5py.Dataset]
    ledger: Ledger | None
    unknown: Mapping[str, Mapping[str, NDArray[np.bool_]]]
    """Steps on which a rank that a sum needs is missing, by group and statistic; only where there are any."""

    def close(self) -> None:
        self.file.close()
        self.view.close()

    def refreshed(self) -> dict[str, NDArray[np.int64]]:
        """Committed steps of every group, after a look at what the writer has added."""
        for dataset in (*self.steps.values(), *(d for columns in self.datasets.values() for d in columns.values())):
            dataset.refresh()
        return self.committed()

    def committed(self) -> dict[str, NDArray[np.int64]]:
        """Committed steps of every group; those of the scalars come last in a commit, so nothing beyond them counts."""
        found = {
            group: _increasing(self._steps(group, min(map(len, columns.values()))))
            for group, columns in self.datasets.items()
        }
        last = found[SCALARS][-1] if found[SCALARS].size else -1
        return {group: steps[steps <= last] for group, steps in found.items()}

    def _steps(self, group: str, most: int) -> NDArray[np.int64]:
        return read_block(self.steps[group], (slice(most),), self.view.peek).astype(np.int64, copy=False)


def _open(path: Path, layout: RunLayout | None = None, attempts: int = _ATTEMPTS) -> _Handle:
    """Open and check a run file; a layout that is already known from it need not be read again."""
    try:
        return _open_checked(path, layout)
    except RefusedError as error:
        raise NotARunFileError(f"{path} is not a run file that can be read: {error}.") from error
    except (RunNotFoundError, UnsupportedSchemaError):
        raise
    except _DAMAGE as error:
        if attempts > 1 and file_state(path) in {FileState.LIVE, FileState.LIVE_HERE}:
            time.sleep(_PAUSE)
            return _open(path, layout, attempts - 1)
        if isinstance(error, RunFileError):
            raise
        raise NotARunFileError(
            f"{path} is damaged or cut off ({path.stat().st_size:,} bytes are there): {error}; copy it again from "
            "where it came, or see what keelscope doctor can read of the run."
        ) from error
    except MemoryError as error:
        raise NotARunFileError(f"{path} needs more memory than there is.") from error


def _open_checked(path: Path, layout: RunLayout | None) -> _Handle:
    state = file_state(path)
    file, view = open_file(path, state)
    try:
        check_schema(file, path)
        if layout is None:
            layout = read_layout(file, view.peek)
        ledger = read_ledger(file, view.peek)
        # The commit marker is written last, so it is looked at first: the rest then holds at least as many rows.
        names = (SCALARS, *(group.name for group in layout.groups))
        steps = {name: child_dataset(child_group(file, name), STEP, "i", 1) for name in names}
        datasets = _find_datasets(file, layout)
        unknown = Extras(path, file, view.peek, layout).unknown() if ledger is not None else {}
    except BaseException:
        file.close()
        view.close()
        raise
    view.expect_numbers()
    return _Handle(state, file, view, layout, datasets, steps, ledger, unknown)


def _find_datasets(file: h5py.File, layout: RunLayout) -> dict[str, dict[str, h5py.Dataset]]:
    found: dict[str, dict[str, h5py.Dataset]] = {}
    for spec in layout.groups:
        group = child_group(file, spec.name)
        found[spec.name] = {s.name: child_dataset(group, s.name, "f", 2 + len(s.dims)) for s in spec.statistics}
        found[spec.name][OBSERVED] = child_dataset(group, OBSERVED, "u", 2)
    scalars = child_group(file, SCALARS)
    names = {WALL_TIME: WALL_TIME} | scalar_names(scalars)
    found[SCALARS] = {label: child_dataset(scalars, name, "f", 1) for label, name in names.items()}
    return found


def _increasing(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """The leading entries that are steps: not negative and increasing."""
    wrong = np.flatnonzero((steps < 0) | (np.diff(steps, prepend=-1) <= 0))
    return steps[: wrong[0]] if wrong.size else steps
