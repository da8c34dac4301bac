"""Writes what `merged` reads into one file: compressed, checksummed, with overviews of a long run; and compares both.

Works through the run in blocks of rows, so that a run of any length fits into memory. `sealing` decides when and where.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.errors import NotARunFileError
from keelscope.store.byrank import write_by_rank, write_ranks
from keelscope.store.commit import State
from keelscope.store.encoding import Storage, create_objects
from keelscope.store.layout import row_shape
from keelscope.store.ledger import Ledger, part_key, write_ledger
from keelscope.store.names import OBSERVED, STATUS, STEP, WALL_TIME, dataset_names
from keelscope.store.overview import LONG_RUN
from keelscope.store.overviewfile import write_overviews
from keelscope.store.rounding import PRECISIONS, fits_float32, rounded
from keelscope.store.runfiles import RunFiles
from keelscope.store.schema import SCALARS, GroupSpec, PartInfo, RunLayout
from keelscope.store.source import RunSource

__all__ = ["blocks_of", "check_equal", "logical_bytes", "write_sealed"]

_BLOCK_CELLS = 2**21
_ALIGNED = 256


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is written, and how."""

    run: RunFiles
    layout: RunLayout
    precision: str

    @property
    def bits(self) -> int:
        return PRECISIONS[self.precision]


def write_sealed(file: h5py.File, run: RunFiles, precision: str) -> None:
    """Fill a new file with a whole run.

    Args:
        file: empty, open for writing.
        run: every part, opened strictly.
        precision: how many bits of the statistics are kept; scalars keep all.

    Raises:
        NotARunFileError: if a part cannot be read.
        OSError: if the file cannot be written.
    """
    plan = _Plan(run, _sealed_layout(run), precision)
    names = (SCALARS, *(group.name for group in plan.layout.groups))
    rows = {name: len(run.steps(name)) for name in names}
    create_objects(file, plan.layout, Storage(rows, _narrow(plan)))
    for group in plan.layout.groups:
        _write_group(file, plan, group)
        if rows[group.name] > LONG_RUN:
            write_overviews(file, run, group)
    _write_scalars(file, plan)
    ranks = write_ranks(file, run)
    if ranks > 1:
        write_by_rank(file, run, ranks, plan.bits)
    _write_status(file, run)
    own = {part_key(source.layout.part) for source in run.sources}
    earlier = [source.ledger.parts for source in run.sources if source.ledger is not None]
    parts = frozenset(own.union(*earlier))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_ledger(file, Ledger(now, run.history.sessions, parts))
    file.attrs["quantization"] = precision


def check_equal(sealed: RunSource, run: RunFiles, precision: str) -> None:
    """Read a sealed file back and compare every number with the parts.

    Args:
        sealed: the file that was written.
        run: the parts.
        precision: as it was written.

    Raises:
        NotARunFileError: if anything differs.
    """
    layout = _sealed_layout(run)
    config = sealed.layout.info.config  # is shortened when it is written
    if sealed.layout != replace(layout, info=replace(layout.info, config=config)):
        raise NotARunFileError("The sealed file does not describe the same run as its parts.")
    for name in (SCALARS, *(group.name for group in layout.groups)):
        if not np.array_equal(sealed.steps(name), run.steps(name)):
            raise NotARunFileError(f"The sealed file does not hold the same steps of {name} as its parts.")
    for group in layout.groups:
        for name in (spec.name for spec in group.statistics):
            _compare(sealed, run, group, name, PRECISIONS[precision])
    for name in (WALL_TIME, *layout.scalars):
        rows = len(run.steps(SCALARS))
        if not np.array_equal(sealed.read(SCALARS, name, 0, rows), run.read(SCALARS, name, 0, rows), equal_nan=True):
            raise NotARunFileError(f"The sealed file does not hold the same {name} as its parts.")


def blocks_of(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that fit into memory, in whole chunks and whole bins of every overview.

    Args:
        rows: of the group.
        width: cells of a row.

    Yields:
        First row and row after the last.
    """
    size = max(1, _BLOCK_CELLS // max(1, width) // _ALIGNED) * _ALIGNED
    for start in range(0, rows, size):
        yield start, min(rows, start + size)


def logical_bytes(run: RunFiles) -> int:
    """Bytes of all numbers of a run as the live files store them.

    Args:
        run: the run.

    Returns:
        8 bytes per value, 1 per observed site, 8 per step.
    """
    total = 8 * len(run.steps(SCALARS)) * (2 + len(run.layout.scalars))
    for group in run.layout.groups:
        cells = sum(math.prod(row_shape(group, spec)) for spec in group.statistics)
        total += len(run.steps(group.name)) * (8 * cells + len(group.sites) + 8)
    return total


def _sealed_layout(run: RunFiles) -> RunLayout:
    """The united layout, in the name of the whole run."""
    last = run.history.sessions[-1] if run.history.sessions else None
    size = max((session.world_size for session in run.history.sessions), default=1)
    steps = run.steps(SCALARS)
    first = int(steps[0]) if steps.size else run.layout.part.first_step
    part = PartInfo(0, size, 0, last.session_id if last else "", first)
    return replace(run.layout, part=part)


def _narrow(plan: _Plan) -> set[tuple[str, str]]:
    """Statistics of which float32 holds every value; most that do not show it in their first rows."""
    return {
        (group.name, spec.name)
        for group in plan.layout.groups
        for spec in group.statistics
        if all(fits_float32(block) for _, block in _values(plan.run, group, spec.name, plan.bits))
    }


def _values(run: RunSource, group: GroupSpec, name: str, bits: int) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """First row of each block, and its values as they are stored."""
    spec = next(spec for spec in group.statistics if spec.name == name)
    for start, stop in blocks_of(len(run.steps(group.name)), math.prod(row_shape(group, spec))):
        yield start, rounded(run.read(group.name, name, start, stop), bits)


def _write_group(file: h5py.File, plan: _Plan, group: GroupSpec) -> None:
    target = file[group.name]
    steps = plan.run.steps(group.name)
    if not steps.size:
        return
    target[STEP][...] = steps
    for start, stop in blocks_of(len(steps), len(group.sites)):
        target[OBSERVED][start:stop] = plan.run.observed(group.name, start, stop)
    for spec in group.statistics:
        for start, block in _values(plan.run, group, spec.name, plan.bits):
            target[spec.name][start : start + len(block)] = block
        if plan.precision != "exact":
            target[spec.name].attrs["quantization"] = f"rounded to {plan.bits} bits of mantissa"


def _write_scalars(file: h5py.File, plan: _Plan) -> None:
    steps, target = plan.run.steps(SCALARS), file[SCALARS]
    if not steps.size:
        return
    target[STEP][...] = steps
    for label, name in {WALL_TIME: WALL_TIME, **dataset_names(plan.layout.scalars)}.items():
        target[name][...] = plan.run.read(SCALARS, label, 0, len(steps))


def _write_status(file: h5py.File, run: RunFiles) -> None:
    found = [source.extras.status() for source in run.sources]
    heartbeat, dropped = max(status[1] for status in found), sum(status[3] for status in found)
    file[STATUS][...] = [State.DONE, heartbeat, len(run.steps(SCALARS)), dropped]


def _compare(sealed: RunSource, run: RunFiles, group: GroupSpec, name: str, bits: int) -> None:
    for start, block in _values(run, group, name, bits):
        stop = start + len(block)
        same = np.array_equal(sealed.read(group.name, name, start, stop), block, equal_nan=True)
        seen = sealed.observed(group.name, start, stop, name=name)
        if not same or not np.array_equal(seen, run.observed(group.name, start, stop, name=name)):
            raise NotARunFileError(f"The sealed file does not hold the same {group.name}/{name} as its parts.")
