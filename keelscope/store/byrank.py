"""What each rank recorded, kept in a sealed file beside the combined values: ``/ranks`` and ``/by_rank``.

Combined values answer what the model did; these answer which rank did it. Written by `sealedfile`, read by `extras`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.store.encoding import PACKED, attach, write_labels
from keelscope.store.filesource import FileSource
from keelscope.store.layout import extra_axes, row_shape
from keelscope.store.ledger import BY_RANK, PRESENT, write_present
from keelscope.store.names import OBSERVED, SITE, STEP
from keelscope.store.rounding import rounded
from keelscope.store.runfiles import RunFiles
from keelscope.store.schema import SCALARS, GroupSpec, StatisticSpec
from keelscope.store.timeline import Stretch
from keelscope.store.union import place_sites

__all__ = ["present_of", "write_by_rank", "write_ranks"]

_ROWS = 256
_RECORDED, _NOT_STARTED = 1, 2


def write_ranks(file: h5py.File, run: RunFiles) -> int:
    """Write which rank recorded which step, if more than one process recorded the run.

    Args:
        file: open for writing.
        run: every part.

    Returns:
        Number of ranks.
    """
    ranks = max((session.world_size for session in run.history.sessions), default=1)
    if ranks > 1:
        write_present(file.create_group("ranks", track_order=True), run.steps(SCALARS), present_of(run, SCALARS, ranks))
    return ranks


def write_by_rank(file: h5py.File, run: RunFiles, ranks: int, bits: int) -> None:
    """Write what each rank recorded of the groups that differ between ranks.

    Args:
        file: open for writing.
        run: every part.
        ranks: how many there are.
        bits: of the mantissa that are kept.
    """
    parent = file.create_group(BY_RANK, track_order=True)
    for group in run.layout.groups:
        if group.provenance.get("reduce") != "replica" and len(run.steps(group.name)):
            _write_group(parent.create_group(group.name, track_order=True), run, group, ranks, bits)


def present_of(run: RunFiles, group: str, ranks: int) -> NDArray[np.uint8]:
    """Which rank recorded which step of a group.

    Args:
        run: every part.
        group: name of the group or ``"scalars"``.
        ranks: how many there are.

    Returns:
        ``[rank, step]``: 0 missing, 1 recorded, 2 not part of the session.
    """
    blocks = [_present(run, group, stretch, ranks) for stretch in run.merged.timeline.stretches[group]]
    return np.concatenate(blocks, axis=1) if blocks else np.empty((ranks, 0), np.uint8)


def _present(run: RunFiles, group: str, stretch: Stretch, ranks: int) -> NDArray[np.uint8]:
    present = np.full((ranks, len(stretch.steps)), _NOT_STARTED, np.uint8)
    present[: run.merged.timeline.sessions[stretch.session].world_size] = 0
    for strand, rows in zip(stretch.strands, stretch.rows, strict=True):
        if strand.rank >= 0:
            present[strand.rank] = _RECORDED if rows is None else rows >= 0
            continue
        present[:] = _NOT_STARTED
        known = run.sources[strand.pieces[0][0]].extras.present(group)
        present[:1] = _RECORDED
        if known is not None:
            present[: len(known)] = known[:ranks, : len(stretch.steps)]
    return present


def _write_group(target: h5py.Group, run: RunFiles, group: GroupSpec, ranks: int, bits: int) -> None:
    present = write_present(target, run.steps(group.name), present_of(run, group.name, ranks))
    sites = write_labels(target, SITE, [site.path for site in group.sites], "dotted path of the module or parameter")
    axes = {dim: _axis(target, dim, values) for dim, values in extra_axes(group).items()}
    for spec in group.statistics:
        row = row_shape(group, spec)
        dataset = _dataset(target, spec.name, present.shape, row, np.float64, np.nan)
        dataset.attrs.update({"units": spec.unit, "long_name": spec.doc, "_FillValue": np.array([np.nan])})
        attach(dataset, target["rank"], target[STEP], sites, *(axes[dim] for dim in spec.dims))
        for rank, start, values, _ in _rows(run, group, spec):
            dataset[rank, start : start + len(values)] = rounded(values, bits)
    _write_observed(target, run, group, sites)


def _write_observed(target: h5py.Group, run: RunFiles, group: GroupSpec, sites: h5py.Dataset) -> None:
    dataset = _dataset(target, OBSERVED, target[PRESENT].shape, (len(group.sites),), np.uint8, 0)
    dataset.attrs.update({"units": "1", "long_name": "whether the rank has seen the site on this step"})
    attach(dataset, target["rank"], target[STEP], sites)
    for rank, start, values, seen in _rows(run, group, group.statistics[0]):
        dataset[rank, start : start + len(values)] = seen


def _axis(target: h5py.Group, name: str, values: tuple[float, ...]) -> h5py.Dataset:
    scale = target.create_dataset(name, data=np.asarray(values, np.float64))
    scale.make_scale(name)
    scale.attrs.update({"units": "1", "long_name": name.replace("_", " ")})
    return scale


def _dataset(
    target: h5py.Group, name: str, lead: tuple[int, ...], row: tuple[int, ...], dtype: type, fill: float
) -> h5py.Dataset:
    tile = tuple(min(size, 256 if axis == 0 else 64) for axis, size in enumerate(row))
    fitting = max(1, min(_ROWS, lead[1], 2**19 // (8 * math.prod(tile))))
    return target.create_dataset(
        name, shape=(*lead, *row), chunks=(1, fitting, *tile), dtype=dtype, fillvalue=fill, **PACKED
    )


_Rows = tuple[int, int, NDArray[np.float64], NDArray[np.bool_]]


def _rows(run: RunFiles, group: GroupSpec, spec: StatisticSpec) -> Iterator[_Rows]:
    """(rank, first row, values, observed) of every stretch that a rank recorded without a gap."""
    begin = 0
    for stretch in run.merged.timeline.stretches[group.name]:
        for strand, rows in zip(stretch.strands, stretch.rows, strict=True):
            if strand.rank < 0:
                source, count = run.sources[strand.pieces[0][0]], strand.pieces[0][1]
                yield from ((rank, begin, *block) for rank, block in _of_sealed(source, group, spec, count))
                continue
            for first, last, place in _runs(rows, len(stretch.steps)):
                for start in range(first, last, _ROWS):
                    stop = min(last, start + _ROWS)
                    block = run.merged.of_strand(strand, group.name, spec.name, start, stop)
                    yield strand.rank, begin + place + start - first, *block
        begin += len(stretch.steps)


def _runs(rows: NDArray[np.int64] | None, size: int) -> Iterator[tuple[int, int, int]]:
    """(first row, row after the last, place) of the stretches on which a rank has every step."""
    if rows is None:
        yield 0, size, 0
        return
    has = np.flatnonzero(rows >= 0)
    for piece in np.split(has, np.flatnonzero(np.diff(has) > 1) + 1) if has.size else ():
        yield int(rows[piece[0]]), int(rows[piece[-1]]) + 1, int(piece[0])


def _of_sealed(
    source: FileSource, group: GroupSpec, spec: StatisticSpec, count: int
) -> Iterator[tuple[int, tuple[NDArray[np.float64], NDArray[np.bool_]]]]:
    """What an earlier sealed file kept of each rank, on the sites of the whole run."""
    own = next((one for one in source.layout.groups if one.name == group.name), None)
    known = source.extras.present(group.name)
    if own is None or known is None or spec.name not in {one.name for one in own.statistics}:
        return
    place = place_sites(own.sites, group.sites)
    target = slice(None) if place is None else place
    for rank in range(len(known)):
        found, looked = source.extras.of_rank(group.name, spec.name, rank, count)
        values, seen = np.full((count, *row_shape(group, spec)), np.nan), np.zeros((count, len(group.sites)), np.bool_)
        values[:, target], seen[:, target] = found, looked
        yield rank, (values, seen)
