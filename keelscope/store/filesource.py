"""`FileSource`: serves a `Run` from a run file, in whatever state the file is.

`opening` opens the file, `decoding` reads the layout, `allowlist` every dataset. Rows count as recorded up to the
commit marker ``step``, so a batch that was being written when the process died is not shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.errors import NotARunFileError, RunFileError, UsageError
from keelscope.store.across import NEEDS_ALL
from keelscope.store.allowlist import RefusedError, child_dataset, child_group
from keelscope.store.decoding import check_schema, read_layout, scalar_names
from keelscope.store.history import History
from keelscope.store.ledger import BY_RANK, PRESENT, Ledger, read_ledger
from keelscope.store.names import ALL, OBSERVED, STEP, WALL_TIME
from keelscope.store.opening import FileState, file_state, open_file, peeking
from keelscope.store.schema import SCALARS, RunLayout
from keelscope.store.view import ClosedView

__all__ = ["FileSource"]

_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, UnicodeError)
_MAX_READ = 16 * 2**30


class FileSource:
    """A `reader.RunSource` on a file.

    Args:
        path: the run file, or one of its parts.
        last: whether it is the latest part of its rank; an earlier one is not being written, whoever holds the lock.

    Raises:
        RunNotFoundError: if there is no such file.
        NotARunFileError: if it is not a run file or is damaged.
        UnsupportedSchemaError: if a newer major version wrote it.
    """

    def __init__(self, path: Path, *, last: bool = True) -> None:
        self._path = path
        self._last = last
        self._handle = _open(path, last=last)
        if self.live:
            self._handle.refresh(path)
        self._steps = self._handle.committed(path)

    @property
    def layout(self) -> RunLayout:
        """What is recorded."""
        return self._handle.layout

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def last(self) -> bool:
        """Whether it may still grow."""
        return self._last

    @property
    def ledger(self) -> Ledger | None:
        """How the file was made, if it is a sealed one."""
        return self._handle.ledger

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
        try:
            values: NDArray[np.generic] = dataset[start:stop, sites] if dataset.ndim > 1 else dataset[start:stop]
        except _DAMAGE as error:
            raise NotARunFileError(f"{self._path} is damaged: {group}/{name} cannot be read ({error}).") from error
        return values

    def refresh(self) -> bool:
        """Look for new rows.

        Returns:
            True if there are any.
        """
        old = self._handle
        if old.state is FileState.CLOSED or not old.file:
            return False
        before = {name: len(steps) for name, steps in self._steps.items()}
        state = _state(self._path, last=self._last)
        if self.live:
            old.refresh(self._path)
            self._handle = replace(old, state=state)
        elif state is not FileState.DEAD or old.state is not state:
            old.close()
            self._handle = _open(self._path, old.layout, last=self._last)
        self._steps = self._handle.committed(self._path)
        return before != {name: len(steps) for name, steps in self._steps.items()}

    def close(self) -> None:
        """Close the file."""
        self._handle.close()


@dataclass(frozen=True, slots=True)
class _Handle:
    """An open run file and its datasets, every one of them checked."""

    state: FileState
    file: h5py.File
    view: ClosedView | None
    layout: RunLayout
    datasets: Mapping[str, Mapping[str, h5py.Dataset]]
    steps: Mapping[str, h5py.Dataset]
    ledger: Ledger | None
    unknown: Mapping[str, Mapping[str, NDArray[np.bool_]]]
    """Steps on which a rank that a sum needs is missing, by group and statistic; only where there are any."""

    def close(self) -> None:
        self.file.close()
        if self.view is not None:
            self.view.close()

    def refresh(self, path: Path) -> None:
        try:
            for dataset in (*self.steps.values(), *(d for columns in self.datasets.values() for d in columns.values())):
                dataset.refresh()
        except _DAMAGE as error:
            raise NotARunFileError(f"{path} is damaged: new rows cannot be read ({error}).") from error

    def committed(self, path: Path) -> dict[str, NDArray[np.int64]]:
        """Committed steps of every group; those of the scalars come last in a commit, so nothing beyond them counts."""
        try:
            found = {
                group: _increasing(self.steps[group][: min(map(len, columns.values()))])
                for group, columns in self.datasets.items()
            }
        except _DAMAGE as error:
            raise NotARunFileError(f"{path} is damaged: its steps cannot be read ({error}).") from error
        last = found[SCALARS][-1] if found[SCALARS].size else -1
        return {group: steps[steps <= last] for group, steps in found.items()}


def _state(path: Path, *, last: bool) -> FileState:
    """An earlier part that is marked as being written was left by a writer that died, also while a new one writes."""
    state = file_state(path)
    return state if last or state is FileState.CLOSED else FileState.DEAD


def _open(path: Path, layout: RunLayout | None = None, *, last: bool = True, attempts: int = 5) -> _Handle:
    """Open and check a run file; a layout that is already known from it need not be read again."""
    try:
        return _open_checked(path, layout, last=last)
    except RefusedError as error:
        raise NotARunFileError(f"{path} is not a run file that can be read: {error}.") from error
    except RunFileError:
        raise
    except _DAMAGE as error:
        # A parent that writes while its forked child reads can be met half way through a write.
        if attempts > 1 and file_state(path) is FileState.LIVE_HERE:
            return _open(path, layout, last=last, attempts=attempts - 1)
        raise NotARunFileError(f"{path} is damaged: {error}.") from error


def _open_checked(path: Path, layout: RunLayout | None, *, last: bool) -> _Handle:
    state = _state(path, last=last)
    file, view = open_file(path, state)
    try:
        check_schema(file, path)
        with peeking(path) as peek:
            if layout is None:
                layout = read_layout(file, peek)
            ledger = read_ledger(file, peek)
        # The commit marker is written last, so it is looked at first: the rest then holds at least as many rows.
        names = (SCALARS, *(group.name for group in layout.groups))
        steps = {name: child_dataset(child_group(file, name), STEP, "i", 1) for name in names}
        datasets = _find_datasets(file, layout)
        unknown = _find_unknown(file, layout) if ledger is not None and BY_RANK in file else {}
    except BaseException:
        file.close()
        if view is not None:
            view.close()
        raise
    if view is not None:
        view.expect_numbers()
    return _Handle(state, file, view, layout, datasets, steps, ledger, unknown)


def _find_unknown(file: h5py.File, layout: RunLayout) -> dict[str, dict[str, NDArray[np.bool_]]]:
    """From a sealed file of several ranks: where the sums over ranks are unknown."""
    parent = child_group(file, BY_RANK)
    found: dict[str, dict[str, NDArray[np.bool_]]] = {}
    for group in (spec for spec in layout.groups if spec.name in parent):
        present = child_dataset(child_group(parent, group.name), PRESENT, "u", 2)
        if present.size > _MAX_READ:
            raise RefusedError(f"{present.name} has {present.size} entries")
        missing = (present[()] == 0).any(axis=0)
        sums = [spec.name for spec in group.statistics if spec.across_ranks in NEEDS_ALL]
        if missing.any():
            found[group.name] = dict.fromkeys(sums, missing)
    return found


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
