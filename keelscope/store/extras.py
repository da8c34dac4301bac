"""What a file holds beside the run itself: its status, and in a sealed file what each rank recorded, and overviews.

`filesource.FileSource.extras` gives it; everything is read through the allow-list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.errors import NotARunFileError
from keelscope.store.across import NEEDS_ALL
from keelscope.store.allowlist import RefusedError, child_dataset, child_group
from keelscope.store.chunks import Peek, read_block
from keelscope.store.history import Absence
from keelscope.store.ledger import BY_RANK, PRESENT, read_absences
from keelscope.store.names import ALL, OBSERVED, STATUS
from keelscope.store.overview import Overview
from keelscope.store.overviewfile import read_overview
from keelscope.store.schema import SCALARS, RunLayout

__all__ = ["Extras"]

_T = TypeVar("_T")
_DAMAGE = (OSError, RuntimeError, KeyError, ValueError, TypeError, RefusedError)
_STATUS = 4


@dataclass(frozen=True, slots=True)
class Extras:
    """Reads the rest of an open run file."""

    path: Path
    file: h5py.File
    peek: Peek
    layout: RunLayout

    def status(self) -> tuple[float, ...]:
        """State, last sign of life in seconds since 1970, rows committed and rows lost, as the writer left them."""

        def read() -> tuple[float, ...]:
            found = read_block(child_dataset(self.file, STATUS, "f", 1), (ALL,), self.peek)
            if len(found) != _STATUS:
                raise RefusedError(f"/{STATUS} has {len(found)} entries")
            return tuple(map(float, found))

        return self._guarded(read)

    def present(self, group: str) -> NDArray[np.uint8] | None:
        """Which rank recorded which step of a group.

        Args:
            group: name of the group or ``"scalars"``.

        Returns:
            ``[rank, step]``, None if one process recorded the run.
        """

        def read() -> NDArray[np.uint8] | None:
            parent = self.file if group == SCALARS else self._by_rank()
            name = "ranks" if group == SCALARS else group
            if parent is None or name not in parent:
                return None
            dataset = child_dataset(child_group(parent, name), PRESENT, "u", 2)
            return read_block(dataset, (ALL, ALL), self.peek).astype(np.uint8)

        return self._guarded(read)

    def of_rank(self, group: str, name: str, rank: int, rows: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """What one rank recorded.

        Args:
            group: a group for which `present` is not None.
            name: statistic.
            rank: the rank.
            rows: how many of the first rows.

        Returns:
            Values ``[step, site, ...]`` and which sites were seen.
        """

        def read() -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
            parent = child_group(child_group(self.file, BY_RANK), group)
            dims = next(s for g in self.layout.groups if g.name == group for s in g.statistics if s.name == name).dims
            at = (slice(rank, rank + 1), slice(rows))
            values = read_block(child_dataset(parent, name, "f", 3 + len(dims)), at, self.peek)[0]
            seen = read_block(child_dataset(parent, OBSERVED, "u", 3), at, self.peek)[0]
            return values.astype(np.float64), seen.astype(np.bool_)

        return self._guarded(read)

    def absences(self, rows: int) -> tuple[Absence, ...]:
        """Which ranks are missing on the first rows of a sealed file."""
        return self._guarded(lambda: tuple(read_absences(self.file, self.peek, rows)))

    def unknown(self) -> dict[str, dict[str, NDArray[np.bool_]]]:
        """Steps on which a sum over ranks is unknown, ``[step]``, by group and statistic; only where there are any."""
        found: dict[str, dict[str, NDArray[np.bool_]]] = {}
        for group in self.layout.groups if BY_RANK in self.file else ():
            present = self.present(group.name)
            missing = (present == 0).any(axis=0) if present is not None else np.zeros(0, np.bool_)
            if missing.any():
                sums = [spec.name for spec in group.statistics if spec.across_ranks in NEEDS_ALL]
                found[group.name] = dict.fromkeys(sums, missing)
        return found

    def overview(self, group: str, name: str, factor: int, sites: slice) -> Overview | None:
        """An overview that the file holds ready made.

        Args:
            group: name of the group.
            name: statistic.
            factor: rows per bin.
            sites: which stretch of the site axis.

        Returns:
            The bins, None if the file has no such overview.
        """
        return self._guarded(lambda: read_overview(self.file, group, name, factor, (ALL, sites), self.peek))

    def _by_rank(self) -> h5py.Group | None:
        return child_group(self.file, BY_RANK) if BY_RANK in self.file else None

    def _guarded(self, read: Callable[[], _T]) -> _T:
        try:
            return read()
        except _DAMAGE as error:
            raise NotARunFileError(f"{self.path} is damaged: {error}.") from error
