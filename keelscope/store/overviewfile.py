"""The overviews that a sealed file of a long run holds: ``/overview_16`` and ``/overview_256``.

Written by `sealedfile`, read by `filesource`. They are for pictures: their values keep 16 bits of mantissa.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.store.allowlist import RefusedError, child_dataset, child_group
from keelscope.store.chunks import Peek, read_block
from keelscope.store.encoding import PACKED, attach, write_labels
from keelscope.store.layout import extra_axes, row_shape
from keelscope.store.names import ALL, OBSERVED, SITE, STEP
from keelscope.store.overview import FACTORS, Overview, reduced, shrunk
from keelscope.store.rounding import rounded
from keelscope.store.schema import GroupSpec
from keelscope.store.source import RunSource

__all__ = ["read_overview", "write_overviews"]

_BITS = 16
_LAST = "last_step"
_COLUMNS = {"mean": "mean", "min": "low", "max": "high"}
_CELLS = 2**20


def write_overviews(file: h5py.File, run: RunSource, group: GroupSpec) -> None:
    """Write every overview of a group.

    Args:
        file: open for writing.
        run: where the rows come from.
        group: the group.
    """
    steps = run.steps(group.name)
    for factor in FACTORS:
        target = file.require_group(_name(factor)).create_group(group.name, track_order=True)
        _write_axes(target, group, *shrunk(steps, factor))
        _describe(file[_name(factor)], factor)
        _create(target, group, len(target[STEP]))
    for spec in group.statistics:
        for start, stop in _blocks(len(steps), math.prod(row_shape(group, spec))):
            values = run.read(group.name, spec.name, start, stop)
            seen = run.observed(group.name, start, stop, name=spec.name)
            for factor in FACTORS:
                target = file[_name(factor)][group.name]
                _write(target, spec.name, start // factor, reduced(steps[start:stop], values, seen, factor))


def read_overview(
    file: h5py.File, group: str, name: str, factor: int, place: tuple[slice, slice], peek: Peek
) -> Overview | None:
    """An overview that the file holds.

    Args:
        file: an open run file.
        group: name of the group.
        name: statistic.
        factor: rows per bin.
        place: which bins and which sites.
        peek: reads bytes of the same file.

    Returns:
        The bins, None if the file has no such overview.

    Raises:
        RefusedError: if it holds something else under that name.
    """
    if _name(factor) not in file or group not in child_group(file, _name(factor)):
        return None
    source = child_group(child_group(file, _name(factor)), group)
    bins, sites = place

    def read(dataset: str, kinds: str, *at: slice) -> NDArray[np.generic]:
        found = source[dataset].ndim if dataset in source else 0
        return read_block(child_dataset(source, dataset, kinds, max(found, len(at))), at, peek)

    steps = [read(one, "i", bins).astype(np.int64) for one in (STEP, _LAST)]
    columns = [read(f"{name}_{kind}", "f", bins, sites).astype(np.float64) for kind in _COLUMNS]
    seen = read(f"{name}_{OBSERVED}", "u", bins, sites).astype(np.bool_)
    if any(len(column) != len(steps[0]) for column in (*steps, *columns, seen)):
        raise RefusedError(f"the overview of {group}/{name} does not fit its steps")
    return Overview(steps[0], steps[1], columns[0], columns[1], columns[2], seen)


def _name(factor: int) -> str:
    return f"overview_{factor}"


def _blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows in whole bins of every overview, a chunk of the coarsest at a time if that is not too much."""
    size = max(FACTORS) * max(1, min(256, _CELLS // (width * max(FACTORS))))
    for start in range(0, rows, size):
        yield start, min(rows, start + size)


def _describe(target: h5py.Group, factor: int) -> None:
    target.attrs["rows_per_bin"] = np.int64(factor)
    target.attrs["quantization"] = f"rounded to {_BITS} bits of mantissa"


def _write_axes(target: h5py.Group, group: GroupSpec, first: NDArray[np.int64], last: NDArray[np.int64]) -> None:
    step = target.create_dataset(STEP, data=first)
    step.make_scale(STEP)
    step.attrs.update({"long_name": "optimizer step of the first row of each bin", "units": "1"})
    end = target.create_dataset(_LAST, data=last)
    end.attrs.update({"long_name": "optimizer step of the last row of each bin", "units": "1"})
    attach(end, step)
    write_labels(target, SITE, [site.path for site in group.sites], "dotted path of the module or parameter")
    for dim, values in extra_axes(group).items():
        scale = target.create_dataset(dim, data=np.asarray(values, np.float64))
        scale.make_scale(dim)
        scale.attrs.update({"long_name": dim.replace("_", " "), "units": "1"})


def _create(target: h5py.Group, group: GroupSpec, bins: int) -> None:
    for spec in group.statistics:
        row = row_shape(group, spec)
        tile = tuple(min(size, 256 if axis == 0 else 64) for axis, size in enumerate(row))
        scales = (target[STEP], target[SITE], *(target[dim] for dim in spec.dims))
        chunks = (max(1, min(256, bins, 2**19 // (8 * math.prod(tile)))), *tile)
        for kind in _COLUMNS:
            name, shape = f"{spec.name}_{kind}", (bins, *row)
            dataset = target.create_dataset(name, shape, np.float64, chunks=chunks, fillvalue=np.nan, **PACKED)
            dataset.attrs.update({"units": spec.unit, "long_name": f"{kind} of: {spec.doc}"})
            attach(dataset, *scales)
        seen = target.create_dataset(
            f"{spec.name}_{OBSERVED}", (bins, row[0]), np.uint8, chunks=(chunks[0], tile[0]), **PACKED
        )
        seen.attrs.update({"units": "1", "long_name": "whether any row of the bin has a value"})
        attach(seen, *scales[:2])


def _write(target: h5py.Group, name: str, start: int, made: Overview) -> None:
    at = slice(start, start + len(made.first))
    for kind, column in _COLUMNS.items():
        target[f"{name}_{kind}"][at, ALL] = rounded(getattr(made, column), _BITS)
    target[f"{name}_{OBSERVED}"][at] = made.observed
