"""`Pieces`: the parts of a run on one common site axis, each read by itself.

`merged` puts their rows together. Of a part only the rows and sites that are asked for are read; what cannot be read is
NaN and not observed, and is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import NotARunFileError
from keelscope.store.chunks import DamagedChunkError
from keelscope.store.names import ALL, OBSERVED, WALL_TIME
from keelscope.store.schema import SCALARS, GroupSpec, RunLayout, StatisticSpec
from keelscope.store.source import RunSource
from keelscope.store.union import place_sites, same_axes, unite

__all__ = ["Piece", "Pieces"]

_LEAST_ROWS = 64  # of a damaged stretch that are given up together
_MOST_TRIES = 256  # so that a file without one sound chunk is read in a bounded time


@dataclass(frozen=True, slots=True)
class Piece:
    """One part file of a run."""

    source: RunSource
    sealed: bool = False
    """Whether it is a sealed file, in which sessions and ranks are merged already."""


class Pieces:
    """Reads single parts on the site axis that all of them share.

    Args:
        pieces: the parts.
        strict: raise when rows of a part cannot be read.
        before: an earlier look at the same parts, whose layout is taken over.
    """

    def __init__(self, pieces: Sequence[Piece], *, strict: bool, before: Pieces | None) -> None:
        self._pieces = tuple(pieces)
        self._strict, self._alone = strict, len(pieces) == 1
        self._layouts = tuple(piece.source.layout for piece in pieces)
        same = before is not None and _same(self._layouts, before._layouts)
        self._axes: _Axes = before._axes if before is not None and same else _axes_of(self._layouts)
        self._delays = [_seconds_between(self._layouts[0], layout) for layout in self._layouts]
        self._broken: dict[tuple[int, str, str], set[tuple[int, int]]] = {}
        if before is not None and same:
            self._broken |= before._broken
        self.groups = self._axes.groups

    @property
    def layout(self) -> RunLayout:
        """Everything that one of the parts has."""
        return self._axes.layout

    @property
    def damaged(self) -> tuple[str, ...]:
        """What could not be read so far, a sentence per file."""
        series: dict[int, list[str]] = {}
        for (index, group, name), rows in self._broken.items():
            steps = self._pieces[index].source.steps(group)
            series.setdefault(index, []).append(f"{group}/{name} on {_steps_text(steps, rows)}")
        return tuple(
            f"{getattr(self._pieces[index].source, 'path', 'The run')} is damaged: {', '.join(found)} cannot be read, "
            "and is left out."
            for index, found in series.items()
        )

    def values(self, index: int, start: int, stop: int, group: str, name: str, sites: slice) -> NDArray[np.float64]:
        """Rows of a statistic or scalar of one part.

        Args:
            index: number of the part.
            start: first row.
            stop: row after the last.
            group: name of the group.
            name: statistic or scalar.
            sites: stretch of the common site axis.

        Returns:
            ``[step, site, ...]``; NaN where the part lacks the site or statistic.
        """
        whole = np.full((stop - start, *self.row_shape(group, name, sites)), np.nan)
        if not self._holds(index, group, name):
            return whole
        source, place = self._pieces[index].source, self._axes.places[index].get(group)
        try:
            if place is None:
                found = source.read(group, name, start, stop, sites)
                return found + self._delays[index] if group == SCALARS and name == WALL_TIME else found
            local, target = _stretch_of(place, self.n_sites(group), sites)
            whole[:, target >= 0] = source.read(group, name, start, stop, local)[:, target[target >= 0]]
        except NotARunFileError as error:
            return self._salvaged(error, index, start, stop, group, name, sites)
        return whole

    def seen(self, index: int, start: int, stop: int, group: str, name: str, sites: slice) -> NDArray[np.bool_]:
        """Rows of which sites one part has seen.

        Args:
            index: number of the part.
            start: first row.
            stop: row after the last.
            group: name of the group.
            name: a statistic, whose value must be known; empty for any.
            sites: stretch of the common site axis.

        Returns:
            ``[step, site]``.
        """
        whole = np.zeros((stop - start, self.n_sites(group, sites)), np.bool_)
        if name and not self._holds(index, group, name):
            return whole
        source, place = self._pieces[index].source, self._axes.places[index].get(group)
        try:
            if place is None:
                whole = source.observed(group, start, stop, sites, name)
            else:
                local, target = _stretch_of(place, self.n_sites(group), sites)
                found = source.observed(group, start, stop, local, name)
                whole[:, target >= 0] = found[:, target[target >= 0]]
        except NotARunFileError as error:
            if not self._gives_up(error, (index, group, OBSERVED), start, stop):
                halves = _halves(start, stop)
                return np.concatenate([self.seen(index, *half, group, name, sites) for half in halves])
        for first, last in self._broken.get((index, group, name), ()):
            whole[max(first - start, 0) : max(last - start, 0)] = False
        return whole

    def spec(self, group: str, name: str) -> StatisticSpec:
        """A statistic of the united layout."""
        return next(spec for spec in self.groups[group].statistics if spec.name == name)

    def n_sites(self, group: str, sites: slice = ALL) -> int:
        """How many sites a stretch of the common axis holds."""
        return len(range(*sites.indices(len(self.groups[group].sites))))

    def row_shape(self, group: str, name: str, sites: slice) -> tuple[int, ...]:
        """Shape of one row of a statistic, or ``()`` for a scalar."""
        if group == SCALARS:
            return ()
        spec = self.spec(group, name)
        return (self.n_sites(group, sites), *(len(spec.coords[dim]) for dim in spec.dims))

    def _salvaged(
        self, error: NotARunFileError, index: int, start: int, stop: int, group: str, name: str, sites: slice
    ) -> NDArray[np.float64]:
        """What can be read of rows that cannot be read at once."""
        if self._gives_up(error, (index, group, name), start, stop):
            return np.full((stop - start, *self.row_shape(group, name, sites)), np.nan)
        return np.concatenate([self.values(index, *half, group, name, sites) for half in _halves(start, stop)])

    def _gives_up(self, error: NotARunFileError, series: tuple[int, str, str], start: int, stop: int) -> bool:
        """Whether rows that cannot be read are few enough to be left out together, which is noted; raises if strict."""
        if self._strict or (self._alone and not isinstance(error.__cause__, DamagedChunkError)):
            raise error  # of several parts, one that is made to do harm is left out
        index, group, _ = series
        least = max(_LEAST_ROWS, len(self._pieces[index].source.steps(group)) // _MOST_TRIES)
        if stop - start > least:
            return False
        self._broken.setdefault(series, set()).add((start, stop))
        return True

    def _holds(self, index: int, group: str, name: str) -> bool:
        layout = self._layouts[index]
        if group == SCALARS:
            return name == WALL_TIME or name in layout.scalars
        own = next((s for g in layout.groups if g.name == group for s in g.statistics if s.name == name), None)
        return own is not None and same_axes(own, self.spec(group, name))


@dataclass(frozen=True, slots=True)
class _Axes:
    """The united layout, and where the sites of each part lie in it."""

    layout: RunLayout
    groups: Mapping[str, GroupSpec]
    places: Sequence[Mapping[str, NDArray[np.int64]]]


def _axes_of(layouts: Sequence[RunLayout]) -> _Axes:
    layout = unite(layouts)
    groups = {group.name: group for group in layout.groups}
    return _Axes(layout, groups, [_placed(own.groups, groups) for own in layouts])


def _placed(own: Sequence[GroupSpec], groups: Mapping[str, GroupSpec]) -> dict[str, NDArray[np.int64]]:
    found = {
        group.name: place_sites(group.sites, groups[group.name].sites)
        for group in own
        if group.sites is not groups[group.name].sites
    }
    return {name: place for name, place in found.items() if place is not None}


def _seconds_between(first: RunLayout, other: RunLayout) -> float:
    """How much later a part counts its time from; 0 where that is not known."""
    try:
        start, later = (datetime.fromisoformat(layout.info.created_at) for layout in (first, other))
        return (later - start).total_seconds()
    except (ValueError, TypeError):
        return 0.0


def _same(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _halves(start: int, stop: int) -> tuple[tuple[int, int], tuple[int, int]]:
    middle = (start + stop) // 2
    return (start, middle), (middle, stop)


def _steps_text(steps: NDArray[np.int64], rows: Iterable[tuple[int, int]]) -> str:
    """Stretches of rows by their steps; those that touch are one."""
    joined: list[list[int]] = []
    for start, stop in sorted(rows):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    spans = [(int(steps[start]), int(steps[min(stop, len(steps)) - 1])) for start, stop in joined if start < len(steps)]
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return f"steps {' and '.join(texts)}"


def _stretch_of(place: NDArray[np.int64], size: int, sites: slice) -> tuple[slice, NDArray[np.int64]]:
    """Which stretch of a part's sites is needed, and for each wanted site its index in that stretch or -1."""
    inverse = np.full(size, -1, np.int64)
    inverse[place] = np.arange(len(place))
    local = inverse[np.arange(size)[sites]]
    held = local[local >= 0]
    if not held.size:
        return slice(0, 0), local
    first, last = int(held.min()), int(held.max()) + 1
    return slice(first, last), np.where(local >= 0, local - first, -1)
