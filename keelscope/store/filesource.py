"""`FileSource`: serves a `Run` from a run file, in whatever state the file is.

`opening` opens the file, `decoding` reads the layout, `allowlist` every dataset. Rows count as recorded up to the commit
marker ``step``, so a batch that was being written when the process died is not shown.
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.errors import NotARunFileError, RunFileError, UsageError
from keelscope.store.allowlist import Refused, child_dataset, child_group
from keelscope.store.decoding import check_schema, read_layout, scalar_names
from keelscope.store.names import OBSERVED, STEP, WALL_TIME
from keelscope.store.opening import FileState, file_state, open_file
from keelscope.store.schema import SCALARS, RunLayout

__all__ = ["FileSource"]

_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, UnicodeError)


class FileSource:
    """A `reader.RunSource` on a file.

    Args:
        path: the run file.

    Raises:
        RunNotFoundError: if there is no such file.
        NotARunFileError: if it is not a run file or is damaged.
        UnsupportedSchemaError: if a newer major version wrote it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    @property
    def layout(self) -> RunLayout:
        """What is recorded."""
        return self._layout

    @property
    def live(self) -> bool:
        """Whether the file was being written when it was last looked at."""
        return self._state in {FileState.LIVE, FileState.LIVE_HERE}

    def steps(self, group: str) -> NDArray[np.int64]:
        """Committed steps of a group, as of the last refresh.

        Args:
            group: name of the group.

        Returns:
            ``[step]``.
        """
        return self._steps[group].copy()

    def read(self, group: str, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """Rows of one dataset.

        Args:
            group: name of the group.
            name: statistic, scalar, or ``"observed"``.
            start: first row.
            stop: row after the last.

        Returns:
            ``[step, ...]``.

        Raises:
            NotARunFileError: if these rows cannot be read.
            UsageError: if the run was closed.
        """
        if not self._file:
            raise UsageError(f"{self._path} was closed; open it again with keelscope.open_run.")
        try:
            values: NDArray[np.generic] = self._datasets[group][name][start:stop]
        except _DAMAGE as error:
            raise NotARunFileError(f"{self._path} is damaged: {group}/{name} cannot be read ({error}).") from error
        return values

    def refresh(self) -> bool:
        """Look for new rows.

        Returns:
            True if there are any.
        """
        if self._state is FileState.CLOSED or not self._file:
            return False
        before = {name: len(steps) for name, steps in self._steps.items()}
        if self._state is FileState.LIVE:
            state = file_state(self._path)
            self._guarded_count(refresh=True)
            self._state = state
        else:
            self.close()
            self._open()
        return before != {name: len(steps) for name, steps in self._steps.items()}

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> None:
        self._state = file_state(self._path)
        self._file = open_file(self._path, self._state)
        try:
            check_schema(self._file)
            self._layout = read_layout(self._file)
            self._datasets = self._find_datasets()
            self._count(refresh=False)
        except Refused as error:
            self._file.close()
            raise NotARunFileError(f"{self._path} is not a run file that can be read: {error}.") from error
        except RunFileError:
            self._file.close()
            raise
        except _DAMAGE as error:
            self._file.close()
            raise NotARunFileError(f"{self._path} is damaged: {error}.") from error

    def _find_datasets(self) -> dict[str, dict[str, h5py.Dataset]]:
        found: dict[str, dict[str, h5py.Dataset]] = {}
        for spec in self._layout.groups:
            group = child_group(self._file, spec.name)
            found[spec.name] = {s.name: child_dataset(group, s.name, "f", 2 + len(s.dims)) for s in spec.statistics}
            found[spec.name][OBSERVED] = child_dataset(group, OBSERVED, "u", 2)
            found[spec.name][STEP] = child_dataset(group, STEP, "i", 1)
        scalars = child_group(self._file, SCALARS)
        names = {WALL_TIME: WALL_TIME} | scalar_names(scalars)
        found[SCALARS] = {label: child_dataset(scalars, name, "f", 1) for label, name in names.items()}
        found[SCALARS][STEP] = child_dataset(scalars, STEP, "i", 1)
        return found

    def _guarded_count(self, *, refresh: bool) -> None:
        try:
            self._count(refresh=refresh)
        except _DAMAGE as error:
            raise NotARunFileError(f"{self._path} is damaged: new rows cannot be read ({error}).") from error

    def _count(self, *, refresh: bool) -> None:
        """Find the committed rows of every group: data can be longer than ``step``, never shorter."""
        self._steps: dict[str, NDArray[np.int64]] = {}
        for group, datasets in self._datasets.items():
            if refresh:
                for dataset in datasets.values():
                    dataset.refresh()
            rows = min(len(dataset) for dataset in datasets.values())
            self._steps[group] = _committed(datasets[STEP][:rows])


def _committed(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """The leading entries that are steps: not negative and increasing."""
    wrong = np.flatnonzero((steps < 0) | (np.diff(steps, prepend=-1) <= 0))
    return steps[: wrong[0]] if wrong.size else steps
