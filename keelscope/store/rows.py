"""Turns a `Row` into checked arrays that belong to the store, so that training may go on changing its own.

`RowPacker.pack` is the only work done in the training thread; `settle` finishes what waits, and `commit` and `memory`
take the `PackedRow`s.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import UsageError
from keelscope.store.layout import checked, row_shape
from keelscope.store.names import OBSERVED
from keelscope.store.schema import Later, Row, RunLayout

__all__ = ["PackedRow", "RowPacker", "settle"]

Groups = dict[str, Mapping[str, NDArray[np.generic]]]
Shapes = Mapping[str, tuple[int, ...]]
"""Statistic -> shape ``[site, ...]`` of one row."""


class PackedRow(NamedTuple):
    """One recorded step as arrays that nobody else holds."""

    step: int
    wall_time: float
    groups: Mapping[str, Mapping[str, NDArray[np.generic]]]
    """``groups[group][statistic]`` float64 ``[site, ...]``, and ``groups[group]["observed"]`` uint8 ``[site]``."""
    scalars: tuple[float | None, ...]
    """In the order of the layout; NaN where nothing was logged, None where a group that waits tells it."""
    layout: RunLayout
    """What it fits."""
    later: Mapping[str, tuple[Later, Shapes]] = MappingProxyType({})
    """Groups that wait for `settle`."""


class RowPacker:
    """Copies and checks rows against a layout.

    Args:
        layout: what is recorded; `layout` holds it as it will be stored.
        last: step of the row before the first, -1 if there is none.
    """

    def __init__(self, layout: RunLayout, last: int = -1) -> None:
        self.layout = checked(layout)
        self._groups = {group.name: group for group in self.layout.groups}
        self._names = frozenset(self.layout.scalars)
        self._left_out = {group.name for group in layout.groups} - self._groups.keys()
        self._shapes = {g.name: {s.name: row_shape(g, s) for s in g.statistics} for g in self.layout.groups}
        self.last = last
        self.unknown_scalars: set[str] = set()
        """Names that were logged but are not in the layout, so that their values are not stored."""

    def pack(self, row: Row) -> PackedRow:
        """Check one row and copy it.

        Args:
            row: the next row.

        Returns:
            Its copy; absent statistics are NaN.

        Raises:
            UsageError: if it does not fit the layout or does not come after the row before it.
        """
        if row.step <= self.last:
            raise UsageError(
                f"Row {row.step} comes after row {self.last}; steps must increase, starting at 0 or above."
            )
        if not row.scalars.keys() <= self._names:
            self.unknown_scalars |= row.scalars.keys() - self._names
        groups = {name: self._pack_group(name, row) for name in row.values if name not in self._left_out}
        scalars = tuple([row.scalars.get(name, math.nan) for name in self.layout.scalars])
        later = {name: (it, self._shapes_of(name, row)) for name, it in row.later.items() if name not in self._left_out}
        self.last = row.step
        return PackedRow(int(row.step), float(row.wall_time), groups, scalars, self.layout, later)

    def _shapes_of(self, name: str, row: Row) -> Shapes:
        shapes = self._shapes.get(name)
        if shapes is None:
            raise UsageError(f"Row {row.step} holds group {name!r}, which the layout does not have.")
        return shapes

    def _pack_group(self, name: str, row: Row) -> dict[str, NDArray[np.generic]]:
        shapes = self._shapes_of(name, row)
        values = row.values[name]
        unknown = values.keys() - shapes.keys()
        if unknown:
            raise UsageError(f"Row {row.step} holds {name}/{min(unknown)}, which the layout does not have.")
        packed: dict[str, NDArray[np.generic]] = {}
        seen = np.zeros(len(self._groups[name].sites), dtype=bool)
        for statistic, shape in shapes.items():
            block = np.full(shape, np.nan) if statistic not in values else np.array(values[statistic], dtype=np.float64)
            if block.shape != shape:
                raise UsageError(f"Row {row.step}: {name}/{statistic} has shape {block.shape}, expected {shape}.")
            packed[statistic] = block
            if name not in row.observed:
                missing = np.isnan(block)
                seen |= ~(missing if block.ndim == 1 else missing.all(axis=tuple(range(1, block.ndim))))
        if name in row.observed:
            seen = np.asarray(row.observed[name], dtype=bool)
        if seen.shape != (len(self._groups[name].sites),):
            raise UsageError(f"Row {row.step}: observed[{name!r}] has shape {seen.shape}, expected one entry per site.")
        packed[OBSERVED] = seen.astype(np.uint8)
        return packed


def settle(rows: Sequence[PackedRow]) -> list[PackedRow]:
    """Finish the groups that wait, those of many rows at once.

    Args:
        rows: in order.

    Returns:
        The same rows with all their groups.

    Raises:
        UsageError: if a group does not fit the layout.
    """
    waiting: dict[Hashable, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        for name, (later, _) in row.later.items():
            waiting[name, later.key].append(place)
    groups: list[Groups] = [dict(row.groups) for row in rows]
    totals: list[dict[str, float]] = [{} for _ in rows]
    for (name, _), places in waiting.items():  # type: ignore[misc]
        blocks, norms = _finished(name, [rows[place].later[name] for place in places])
        for index, place in enumerate(places):
            groups[place][name] = {statistic: block[index] for statistic, block in blocks.items()}
            for total, norm in norms.items():  # of several groups that tell one, the first does
                totals[place].setdefault(total, float(norm[index]))
    whole = zip(rows, groups, totals, strict=True)
    return [_settled(row, own, told) if row.later else row for row, own, told in whole]


def _settled(row: PackedRow, groups: Groups, told: dict[str, float]) -> PackedRow:
    named = zip(row.layout.scalars, row.scalars, strict=True)
    scalars = tuple([told.get(name, math.nan) if value is None else value for name, value in named])
    return row._replace(groups=groups, scalars=scalars, later={})


def _finished(
    name: str, several: Sequence[tuple[Later, Shapes]]
) -> tuple[dict[str, NDArray[np.generic]], dict[str, NDArray[np.float64]]]:
    """Statistic, and whether sites were observed -> ``[row, site, ...]``; and the scalar that they tell, ``[row]``."""
    first, shapes = several[0]
    values, seen = first.together([later for later, _ in several])
    totals = {first.total: _norms(values["norm"], seen)} if first.total and "norm" in values else {}
    blocks: dict[str, NDArray[np.generic]] = {}
    for statistic, shape in shapes.items():
        found = values.get(statistic)
        block = np.full((len(several), *shape), np.nan) if found is None else found[:, : shape[0]]
        if block.shape[1:] != shape:
            raise UsageError(f"{name}/{statistic} has shape {block.shape[1:]}, expected {shape}.")
        blocks[statistic] = block
    if seen is None:
        seen = np.any([_has_value(block) for block in blocks.values()], axis=0)
    blocks[OBSERVED] = seen[:, : next(iter(shapes.values()))[0]].astype(np.uint8)
    return blocks, totals


@np.errstate(all="ignore")
def _norms(norms: NDArray[np.float64], seen: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """``[row]``: norms ``[row, site]`` of those that were seen, together; NaN where none was."""
    where = ~np.isnan(norms) if seen is None else seen
    squares = np.square(norms, where=where, out=np.zeros_like(norms))
    found: NDArray[np.float64] = np.where(where.any(axis=1), np.sqrt(squares.sum(axis=1)), math.nan)
    return found


def _has_value(block: NDArray[np.generic]) -> NDArray[np.bool_]:
    """``[row, site]`` of ``[row, site, ...]``."""
    found: NDArray[np.bool_] = np.logical_not(np.isnan(block).reshape(*block.shape[:2], -1).all(axis=2))
    return found
