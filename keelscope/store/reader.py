"""`Run`: read access to one recorded run, and `open_run`, which opens a run file.

`Run` is the same whether the numbers come from a file (`filesource`) or from memory (`memory`): it sees a `RunSource`.
Everything that reads runs (analysis, reports, dashboards) goes through it and through the `Series` it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import SeriesNotFoundError
from keelscope.store.armed import armed_notes
from keelscope.store.history import History
from keelscope.store.names import ALL, WALL_TIME
from keelscope.store.overview import Overview, joined, reduced
from keelscope.store.schema import SCALARS, CoverageEntry, GroupSpec, RunInfo, StatisticSpec
from keelscope.store.series import Series, united
from keelscope.store.source import RunSource

if TYPE_CHECKING:
    import pandas as pd
    import xarray

__all__ = ["Run", "open_run"]

_BLOCK = 4096


def open_run(path: str | Path, *, isolated: bool = False) -> Run:
    """Open a run for reading, whether it is finished, being written, or was left by a killed process.

    All parts of the run are read as one, those of other processes and of earlier sessions too; what is missing or could
    not be read is said in `Run.notes`. No file is changed. A run file is treated as untrusted input: only what the
    format allows is read.

    Args:
        path: the file that was named when recording.
        isolated: let another process read the file. A file that somebody forged can crash or hang HDF5 itself, which
            then takes only that process down and is an error here. Costs 0.3 s once and a copy of what is read.

    Returns:
        The run. It holds its files open until `Run.close`.

    Raises:
        RunNotFoundError: if there is no such file.
        NotARunFileError: if it is not a run file, is damaged, or holds something a run file must not hold.
        UnsupportedSchemaError: if a newer major version of keelscope wrote it.
    """
    found = Path(path).expanduser()
    if isolated:
        from keelscope.store.isolated import IsolatedSource

        return Run(IsolatedSource(found), found)
    from keelscope.store.runfiles import RunFiles

    return Run(RunFiles(found), found)


class Run:
    """One recorded run: series by name, and what is known about the run as a whole.

    Args:
        source: where the numbers come from.
        path: the file, None for a run in memory.
    """

    def __init__(self, source: RunSource, path: Path | None = None) -> None:
        self._source = source
        self.path = path
        self.groups = _groups_of(source)

    @property
    def info(self) -> RunInfo:
        """What is known about the run as a whole."""
        return self._source.layout.info

    @property
    def coverage(self) -> tuple[CoverageEntry, ...]:
        """What was observed, what was not, and why."""
        return tuple(self._source.layout.coverage)

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalar series; ``wall_time``, in seconds since the run was created, is always among them."""
        return tuple(dict.fromkeys((*self._source.layout.scalars, WALL_TIME)))

    @property
    def live(self) -> bool:
        """Whether the run was still being written when it was opened or last refreshed."""
        return self._source.live

    @property
    def stopped(self) -> bool:
        """Whether the recording process ended without closing the file; what it had committed is all there."""
        return self._source.stopped

    @property
    def history(self) -> History:
        """The sessions that recorded it, which ranks are missing where, and what could not be read."""
        return self._source.history

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers has to know, a sentence each: damage, missing ranks, overtaken or added rows."""
        return (*self._source.history.notes, *armed_notes(self.scalars, lambda name: self.read(f"{SCALARS}/{name}")))

    @property
    def steps(self) -> NDArray[np.int64]:
        """Every step on which a statistic was recorded, ``[step]``; scalars may have been logged on more."""
        if not self.groups:
            return self._source.steps(SCALARS)
        return united(self._source.steps(name) for name in self.groups)

    def keys(self) -> list[str]:
        """Names of all series.

        Returns:
            ``"group/statistic"`` in recorded order, then ``"scalars/name"``.
        """
        statistics = [f"{group.name}/{spec.name}" for group in self.groups.values() for spec in group.statistics]
        return [*statistics, *(f"{SCALARS}/{name}" for name in self.scalars)]

    def read(self, key: str, start: int | None = None, stop: int | None = None, *, sites: slice = ALL) -> Series:
        """Some rows of one series.

        Args:
            key: ``"group/statistic"`` or ``"scalars/name"``.
            start: first row, counted from the end if negative.
            stop: row after the last.
            sites: which stretch of the site axis; a few sites of a long run are read without the others.

        Returns:
            The series with those rows and sites only.

        Raises:
            SeriesNotFoundError: if the run does not hold it; the message names the nearest ones.
        """
        group, _, name = key.partition("/")
        steps = self._source.steps(group) if group == SCALARS or group in self.groups else np.empty(0, np.int64)
        first, last, _ = slice(start, stop).indices(len(steps))
        spec = self._statistic(group, name)
        if spec is None:
            raise SeriesNotFoundError(self._not_found(key))
        values = self._source.read(group, name, first, max(first, last), sites)
        axis = self.groups[group].sites[sites] if group in self.groups else ()
        return Series(key, values, steps[first:last], axis, spec.unit, spec.doc, spec.dims)

    def get(self, key: str) -> Series | None:
        """One series, or None.

        Args:
            key: ``"group/statistic"`` or ``"scalars/name"``.

        Returns:
            The series, None if the run does not hold it.
        """
        return self.read(key) if key in self else None

    def steps_of(self, group: str) -> NDArray[np.int64]:
        """The recorded steps of one group, without reading a statistic; probes may record at their own rhythm.

        Args:
            group: name of a group, or ``"scalars"``.

        Returns:
            ``[step]``, strictly increasing.

        Raises:
            SeriesNotFoundError: if the run has no such group.
        """
        if group != SCALARS and group not in self.groups:
            raise SeriesNotFoundError(self._not_found(group))
        return self._source.steps(group)

    def observed(
        self, key: str, start: int | None = None, stop: int | None = None, *, sites: slice = ALL
    ) -> NDArray[np.bool_]:
        """Whether each site was seen on each step, so that a NaN there is a computed one.

        Args:
            key: name of a group, or ``"group/statistic"``: a sum over ranks is unknown where one of them is missing, so
                that the site counts as not observed there.
            start: first row, counted from the end if negative.
            stop: row after the last.
            sites: which stretch of the site axis.

        Returns:
            ``[step, site]``.

        Raises:
            SeriesNotFoundError: if the run has no such group.
        """
        group, _, name = key.partition("/")
        if group not in self.groups or (name and self._statistic(group, name) is None):
            raise SeriesNotFoundError(self._not_found(key))
        first, last, _ = slice(start, stop).indices(len(self._source.steps(group)))
        return self._source.observed(group, first, max(first, last), sites, name)

    def overview(self, key: str, factor: int, *, sites: slice = ALL) -> Overview:
        """One series in fewer rows: mean, lowest and highest value of every `factor` recorded rows.

        Sealed files of long runs hold those for 16 and 256 ready made, so that a picture of a long run needs no more
        than they do; otherwise every row is read. Ready-made ones keep 16 bits of mantissa.

        Args:
            key: ``"group/statistic"``.
            factor: rows per bin, at least 1.
            sites: which stretch of the site axis.

        Returns:
            The bins, the last of which may hold fewer rows.

        Raises:
            SeriesNotFoundError: if the run does not hold it.
        """
        found = self.stored_overview(key, factor, sites=sites)
        if found is not None:
            return found
        rows, block = len(self._source.steps(key.partition("/")[0])), factor * max(1, _BLOCK // factor)
        return joined([self._reduced(key, at, at + block, factor, sites) for at in range(0, max(rows, 1), block)])

    def stored_overview(self, key: str, factor: int, *, sites: slice = ALL) -> Overview | None:
        """As `overview`, only if the run holds it ready made.

        Args:
            key: ``"group/statistic"``.
            factor: rows per bin.
            sites: which stretch of the site axis.

        Returns:
            The bins, or None.

        Raises:
            SeriesNotFoundError: if the run does not hold the series.
        """
        group, _, name = key.partition("/")
        if group not in self.groups or self._statistic(group, name) is None:
            raise SeriesNotFoundError(self._not_found(key))
        return self._source.overview(group, name, factor, sites)

    def refresh(self) -> bool:
        """Look for rows that were committed since the run was opened or last refreshed.

        Returns:
            True if there are any.
        """
        grown = self._source.refresh()
        self.groups = _groups_of(self._source)
        return grown

    def close(self) -> None:
        """Close the file. Series that were read stay valid."""
        self._source.close()

    def to_xarray(self) -> xarray.DataTree:
        """The whole run as an xarray tree, one node per group, read into memory (needs xarray).

        Returns:
            A tree whose nodes have the dimensions ``step`` and ``site``; ``tree["gradients"]["rms"]`` is an array.
        """
        from keelscope.store.labelled import to_tree

        return to_tree(self)

    def to_frame(self, *keys: str) -> pd.DataFrame:
        """Series as one long pandas table, read into memory (needs pandas).

        Args:
            keys: ``"group/statistic"`` or ``"scalars/name"``; none means all.

        Returns:
            Columns ``step``, ``group``, ``statistic``, ``site``, ``part`` (such as ``"quantile=0.5"``, mostly empty)
            and ``value``. A site that was not seen on a step has no row there.

        Raises:
            UsageError: if pandas is not installed.
            SeriesNotFoundError: if the run does not hold a series; the message names the nearest ones.
        """
        from keelscope.store.framing import to_frame

        for key in keys:
            self.read(key, 0, 0)
        return to_frame(self, keys or self.keys())

    def dash(self, page: str = "", *, height: int = 900) -> object:
        """The dashboard of this run as the output of a notebook cell, for as long as the process lives.

        Args:
            page: its name in the address, such as ``"depth"``; the overview if empty.
            height: pixels.

        Returns:
            What the notebook draws; its ``url`` can be opened in a browser of the same machine.
        """
        from keelscope.store.viewing import viewed

        return viewed(self.path, page, height)

    def _reduced(self, key: str, start: int, stop: int, factor: int, sites: slice) -> Overview:
        series, seen = self.read(key, start, stop, sites=sites), self.observed(key, start, stop, sites=sites)
        return reduced(series.steps, np.asarray(series.values, np.float64), seen, factor)

    def _statistic(self, group: str, name: str) -> StatisticSpec | None:
        if group == SCALARS and name in self.scalars:
            is_ours = name == WALL_TIME and name not in self._source.layout.scalars
            return StatisticSpec(name, *(("s", "seconds since the run was created") if is_ours else ("", "")))
        known = self.groups[group].statistics if group in self.groups else ()
        return next((spec for spec in known if spec.name == name), None)

    def _not_found(self, key: str) -> str:
        near = get_close_matches(key, self.keys() if "/" in key else list(self.groups), n=3, cutoff=0.6)
        name = key.rpartition("/")[2]
        near += [known for known in self.keys() if known.endswith(f"/{name}") and known not in near][:3]
        hint = f"Did you mean {' or '.join(near[:3])}?" if near else f"It holds {', '.join(self.keys())}."
        return f"{self.path or 'The run in memory'} does not hold {key!r}. {hint}"

    def __getitem__(self, key: str) -> Series:
        return self.read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        from keelscope.store.describe import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from keelscope.store.describe import as_html

        return as_html(self)


def _groups_of(source: RunSource) -> Mapping[str, GroupSpec]:
    return {group.name: group for group in source.layout.groups}
