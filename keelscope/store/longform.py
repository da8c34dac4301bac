"""A run as one long table: a row for each number, with its step, group, statistic, site and part.

Made in blocks of bounded size, so that a run need not fit into memory to be exported. Used by `reader.Run.to_frame` and
`keelscope.export`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keelscope.store.names import ALL
from keelscope.store.schema import SCALARS, GroupSpec
from keelscope.store.series import Series

__all__ = ["COLUMNS", "LongBlock", "ReadableRun", "long_blocks", "parts_of"]

COLUMNS = ("step", "group", "statistic", "site", "part", "value")
"""``part`` names one entry of further axes, such as ``quantile=0.5``; it is empty for most statistics."""
_CELLS = 2**20


class ReadableRun(Protocol):
    """What is needed of a run."""

    groups: Mapping[str, GroupSpec]

    def steps_of(self, group: str) -> NDArray[np.int64]:
        """The recorded steps of one group."""

    def read(self, key: str, start: int | None = None, stop: int | None = None, *, sites: slice = ALL) -> Series:
        """Some rows of one series."""

    def observed(
        self, key: str, start: int | None = None, stop: int | None = None, *, sites: slice = ALL
    ) -> NDArray[np.bool_]:
        """Whether the value of each site is known on each step."""


@dataclass(frozen=True, slots=True)
class LongBlock:
    """Some rows of the table, all of one series."""

    group: str
    statistic: str
    steps: NDArray[np.int64]
    """``[row]``"""
    sites: tuple[str, ...]
    """Paths that `site` counts; one empty text for a scalar."""
    site: NDArray[np.intp]
    """``[row]``"""
    parts: tuple[str, ...]
    part: NDArray[np.intp]
    """``[row]``"""
    values: NDArray[np.float64]
    """``[row]``"""


def long_blocks(
    run: ReadableRun, keys: Iterable[str], sites: Mapping[str, NDArray[np.intp]], steps: slice = ALL
) -> Iterator[LongBlock]:
    """The table of a run, block by block.

    Args:
        run: the run.
        keys: the series, as ``group/statistic``.
        sites: for each group, which sites, as indices.
        steps: from which step on, before which step, and every how-manieth recorded one.

    Yields:
        Blocks in the order of `keys` and steps. A site that was not seen on a step has no row, so a NaN was computed.
    """
    for key in keys:
        group, _, name = key.partition("/")
        rows = _rows(run.steps_of(group), steps)
        parts = parts_of(run.groups.get(group), name)
        width = max(1, len(sites.get(group, ()))) * len(parts)
        for some in np.array_split(rows, max(1, -(-len(rows) * width // _CELLS))):
            if some.size:
                yield _block(run, key, some, sites, parts)


def parts_of(spec: GroupSpec | None, name: str) -> tuple[str, ...]:
    """What the entries of the further axes of a statistic are called.

    Args:
        spec: its group, None for scalars.
        name: the statistic.

    Returns:
        One text per entry, a single empty one without further axes.
    """
    statistic = next((one for one in spec.statistics if one.name == name), None) if spec else None
    if statistic is None or not statistic.dims:
        return ("",)
    axes = [[f"{dim}={value:g}" for value in statistic.coords[dim]] for dim in statistic.dims]
    return tuple(" ".join(entry) for entry in itertools.product(*axes))


def _rows(recorded: NDArray[np.int64], steps: slice) -> NDArray[np.intp]:
    first = 0 if steps.start is None else int(np.searchsorted(recorded, steps.start))
    last = len(recorded) if steps.stop is None else int(np.searchsorted(recorded, steps.stop))
    return np.arange(first, last, steps.step or 1)


def _block(
    run: ReadableRun, key: str, rows: NDArray[np.intp], sites: Mapping[str, NDArray[np.intp]], parts: tuple[str, ...]
) -> LongBlock:
    group, _, name = key.partition("/")
    start, stop = int(rows[0]), int(rows[-1]) + 1
    series = run.read(key, start, stop)
    if group == SCALARS:
        values = series.values[rows - start].reshape(len(rows), 1, 1)
        seen, paths = np.ones((len(rows), 1), np.bool_), ("",)
    else:
        chosen = sites[group]
        values = series.values[rows - start][:, chosen].reshape(len(rows), len(chosen), len(parts))
        seen = run.observed(key, start, stop)[rows - start][:, chosen]
        paths = tuple(series.sites[index].path for index in chosen)
    at_row, at_site = np.nonzero(seen)
    return LongBlock(
        group,
        name,
        np.repeat(series.steps[rows - start][at_row], len(parts)),
        paths,
        np.repeat(at_site, len(parts)),
        parts,
        np.tile(np.arange(len(parts)), len(at_row)),
        np.asarray(values[at_row, at_site], np.float64).reshape(-1),
    )
