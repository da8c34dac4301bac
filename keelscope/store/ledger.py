"""What a sealed file says of its making: its sessions, the parts that went into it, and which rank recorded which step.

`seal` writes it and `filesource` reads it, through the allow-list. Part files have none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.store.allowlist import RefusedError, child_dataset, child_group, read_labels, text_attribute
from keelscope.store.chunks import Peek, read_block
from keelscope.store.encoding import PACKED, attach
from keelscope.store.history import Absence, SessionInfo
from keelscope.store.names import STEP, clean
from keelscope.store.schema import PartInfo

__all__ = [
    "BY_RANK",
    "PRESENT",
    "Ledger",
    "PartKey",
    "part_key",
    "read_absences",
    "read_ledger",
    "write_ledger",
    "write_present",
]

BY_RANK = "by_rank"
PRESENT = "present"
_SESSIONS = "sessions"
_MERGED = "merged_parts"
_RANKS = "ranks"
_MOST = 100_000
_DOCS = {
    "session_id": "random, the same in all parts of one session",
    "first_step": "first step that counts, -1 if none does",
    "last_step": "last step that counts, -1 if none does",
    "resumed_at_step": "where it went on with an earlier session, -1 for the first",
    "rows": "recorded steps that count",
    "rows_cut": "recorded steps that a later session overtook",
    "world_size": "processes that recorded",
    "parts": "files",
    "rank": "process that wrote the part",
    "part": "its number among the files of that rank",
}
PartKey = tuple[int, int, str]
"""(rank, part, session id)."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """How a sealed file was made."""

    sealed_at: str
    sessions: tuple[SessionInfo, ...] = ()
    parts: frozenset[PartKey] = frozenset()
    """The files that were merged into it: what is left of them beside it holds nothing new."""
    absences: tuple[Absence, ...] = ()


def part_key(part: PartInfo) -> PartKey:
    """What tells one part from another part of the same run.

    Args:
        part: from the layout of a file.

    Returns:
        Rank, number and session.
    """
    return part.rank, part.part, part.session_id


def read_ledger(file: h5py.File, peek: Peek) -> Ledger | None:
    """How a file was made.

    Args:
        file: an open run file.
        peek: reads bytes of the same file.

    Returns:
        None if the file was not sealed.

    Raises:
        RefusedError: if it holds something else under those names.
    """
    sealed_at = clean(text_attribute(file, "sealed_at", ""))
    if not sealed_at:
        return None
    sessions = _columns(file, _SESSIONS, [field.name for field in fields(SessionInfo)], peek)
    merged = _columns(file, _MERGED, ["rank", "part", "session_id"], peek)
    return Ledger(
        sealed_at,
        tuple(SessionInfo(*row) for row in sessions),
        frozenset((rank, part, session) for rank, part, session in merged),
        tuple(read_absences(file, peek)) if _RANKS in file else (),
    )


def write_ledger(file: h5py.File, ledger: Ledger) -> None:
    """Add sessions and parts to a file that is being sealed.

    Args:
        file: open for writing.
        ledger: what to write; absences follow from what `byrank` writes.
    """
    file.attrs["sealed_at"] = ledger.sealed_at
    file.attrs["parts_merged"] = np.int64(len(ledger.parts))
    file.attrs["rows_dropped_overlap"] = np.int64(sum(session.rows_cut for session in ledger.sessions))
    table = {field.name: [getattr(s, field.name) for s in ledger.sessions] for field in fields(SessionInfo)}
    _write_table(file, _SESSIONS, table)
    ranks, parts, sessions = zip(*sorted(ledger.parts), strict=True)
    _write_table(file, _MERGED, {"rank": ranks, "part": parts, "session_id": sessions})


def write_present(group: h5py.Group, steps: NDArray[np.int64], present: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Write which rank recorded which step, with both axes.

    Args:
        group: an empty group.
        steps: ``[step]``.
        present: ``[rank, step]``, see `byrank.present_of`.

    Returns:
        `present`.
    """
    rank = group.create_dataset("rank", data=np.arange(len(present), dtype=np.int32))
    step = group.create_dataset(STEP, data=steps)
    rank.make_scale("rank")
    step.make_scale(STEP)
    rank.attrs.update({"long_name": "process", "units": "1"})
    step.attrs.update({"long_name": "optimizer step", "units": "1"})
    dataset = group.create_dataset(PRESENT, data=present, **(PACKED if present.size else {}))
    dataset.attrs.update({"long_name": "whether the rank recorded the step", "units": "1"})
    flags = np.array([0, 1, 2], np.uint8)
    dataset.attrs.update({"flag_values": flags, "flag_meanings": "missing recorded not_started"})
    attach(dataset, rank, step)
    return present


def _write_table(file: h5py.File, name: str, columns: Mapping[str, Sequence[object]]) -> None:
    group = file.create_group(name, track_order=True)
    entry = group.create_dataset("entry", data=np.arange(len(next(iter(columns.values()))), dtype=np.int32))
    entry.make_scale("entry")
    entry.attrs.update({"long_name": "number of the entry", "units": "1"})
    for column, values in columns.items():
        text = column == "session_id"
        data = list(values) if text else np.array(values, np.int64)
        dataset = group.create_dataset(column, data=data, dtype=h5py.string_dtype() if text else None)
        dataset.attrs.update({"long_name": _DOCS[column]} | ({} if text else {"units": "1"}))
        attach(dataset, entry)


def _columns(file: h5py.File, name: str, columns: Sequence[str], peek: Peek) -> list[tuple[Any, ...]]:
    group = child_group(file, name)
    found: list[list[Any]] = []
    for column in columns:
        if column == "session_id":
            found.append([clean(text) for text in read_labels(group, column, peek)])
            continue
        dataset = child_dataset(group, column, "i", 1)
        if len(dataset) > _MOST:
            raise RefusedError(f"/{name} has {len(dataset)} entries")
        found.append(read_block(dataset, (slice(None),), peek).tolist())
    if len(set(map(len, found))) > 1:
        raise RefusedError(f"the columns of /{name} do not fit each other")
    return list(zip(*found, strict=True))


def read_absences(file: h5py.File, peek: Peek, rows: int | None = None) -> list[Absence]:
    """Which ranks recorded nothing on which steps of a sealed file of several ranks.

    Args:
        file: an open run file.
        peek: reads bytes of the same file.
        rows: how many of its first rows count; all if None.

    Returns:
        One entry per rank that is missing somewhere.

    Raises:
        RefusedError: if it holds something else under those names.
    """
    group = child_group(file, _RANKS)
    steps, present = child_dataset(group, STEP, "i", 1), child_dataset(group, PRESENT, "u", 2)
    if present.shape[1:] != steps.shape:
        raise RefusedError("/ranks/present does not fit /ranks/step")
    numbers = read_block(steps, (slice(rows),), peek)
    table = read_block(present, (slice(None), slice(rows)), peek)
    missing = [(rank, numbers[table[rank] == 0]) for rank in range(len(table))]
    return [Absence(rank, len(gone), int(gone[0]), int(gone[-1])) for rank, gone in missing if len(gone)]
