"""Which rows of which part make up a run: sessions in order, overtaken rows cut, ranks side by side.

Pure arithmetic on recorded steps, used by `merged`. Each session owns a stretch of steps: it ends where the next
session with rows begins. Within a session every rank has a strand, which is its parts one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keelscope.store.history import Absence, SessionInfo
from keelscope.store.schema import SCALARS, PartInfo
from keelscope.store.series import united

__all__ = ["PieceRows", "Strand", "Stretch", "Timeline", "weave"]

_NEVER = int(np.iinfo(np.int64).max)
_MOST_RANKS = 65536


@dataclass(frozen=True, slots=True)
class PieceRows:
    """What one part file has recorded."""

    part: PartInfo
    steps: Mapping[str, NDArray[np.int64]]
    """Committed steps by group, those of the scalars included."""
    sealed: bool = False
    """Whether earlier sessions and all ranks are merged in it already."""


@dataclass(frozen=True, slots=True)
class Strand:
    """The rows of a group that one rank recorded in one session."""

    rank: int
    pieces: tuple[tuple[int, int], ...]
    """(index of the piece, how many of its first rows count), in order."""
    steps: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stretch:
    """The rows of a group in one session, on every step that some rank recorded."""

    session: int
    steps: NDArray[np.int64]
    strands: tuple[Strand, ...]
    rows: tuple[NDArray[np.int64] | None, ...]
    """Per strand and step: its row, -1 where the rank has none; None where strand and stretch have the same steps."""

    def present(self) -> NDArray[np.int64]:
        """How many ranks recorded each step, ``[step]``."""
        counts = np.zeros(len(self.steps), np.int64)
        for rows in self.rows:
            counts += 1 if rows is None else (rows >= 0)
        return counts


@dataclass(frozen=True, slots=True)
class Timeline:
    """Sessions in order, and the rows of every group in each."""

    sessions: tuple[SessionInfo, ...]
    stretches: Mapping[str, tuple[Stretch, ...]]
    """By group; stretches without rows are left out."""

    def steps(self, group: str) -> NDArray[np.int64]:
        """All steps of a group, ``[step]``, strictly increasing.

        Args:
            group: name of a group or ``"scalars"``.

        Returns:
            A new array.
        """
        found = [stretch.steps for stretch in self.stretches[group]]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def between(self, group: str, start: int, stop: int) -> Iterator[tuple[Stretch, int, int]]:
        """The stretches that rows of a group lie in.

        Args:
            group: name of a group or ``"scalars"``.
            start: first row.
            stop: row after the last.

        Yields:
            A stretch and the range of its own rows.
        """
        begin = 0
        for stretch in self.stretches[group]:
            end = begin + len(stretch.steps)
            if start < end and begin < stop:
                yield stretch, max(start, begin) - begin, min(stop, end) - begin
            begin = end

    def absences(self) -> list[Absence]:
        """Which ranks recorded nothing on which steps of their session."""
        return [absent for stretch in self.stretches[SCALARS] for absent in self._absent(stretch)]

    def _absent(self, stretch: Stretch) -> Iterator[Absence]:
        size = self.sessions[stretch.session].world_size
        known = {strand.rank: rows for strand, rows in zip(stretch.strands, stretch.rows, strict=True)}
        if size == 1 or -1 in known:
            return
        for rank in range(size):
            rows = known.get(rank, np.full(len(stretch.steps), -1))
            missing = stretch.steps[rows < 0] if rows is not None else stretch.steps[:0]
            if missing.size:
                yield Absence(rank, missing.size, int(missing[0]), int(missing[-1]))


def weave(pieces: Sequence[PieceRows], groups: Sequence[str], live: Collection[int] = ()) -> Timeline:
    """Put the parts of a run together.

    Args:
        pieces: the parts in any order of ranks, each rank's in order of their numbers.
        groups: every group, ``"scalars"`` included.
        live: ranks that are being recorded. Of several ranks, steps that a live one has not reached are held back,
            because its values still come.

    Returns:
        The timeline.
    """
    order = _session_of_each(pieces)
    limits = _limits(pieces, order)
    shown = [min(limit, held) for limit, held in zip(limits, _held_back(pieces, order, limits, live), strict=True)]
    count = max(order, default=-1) + 1
    found = {
        group: [_stretch(pieces, group, session, order, shown) for session in range(count)]
        for group in (SCALARS, *(name for name in groups if name != SCALARS))
    }
    sessions = [_describe(pieces, session, order, limits, found[SCALARS][session]) for session in range(count)]
    kept = {group: tuple(one for one in stretches if len(one.steps)) for group, stretches in found.items()}
    return Timeline(tuple(sessions), kept)


def _session_of_each(pieces: Sequence[PieceRows]) -> list[int]:
    """Number of the session of each piece. Sessions of several ranks match by id, else by where they went on."""
    known: list[tuple[str, int]] = [("", _NEVER)] if any(piece.sealed for piece in pieces) else []
    order = [0] * len(pieces)
    ranks = sorted({piece.part.rank for piece in pieces if not piece.sealed})
    for rank in ranks:
        last, place = None, -1
        for index, piece in enumerate(pieces):
            key = (piece.part.session_id, piece.part.resumed_at_step)
            if piece.sealed or piece.part.rank != rank:
                continue
            if key != last:
                place = _match(known, key, place + 1 if rank != ranks[0] else len(known))
            last, order[index] = key, place
    return order


def _match(known: list[tuple[str, int]], key: tuple[str, int], start: int) -> int:
    """Number of a session that another rank has told of, or of a new one."""
    later = range(start, len(known))
    found = [i for i in later if known[i][0] == key[0] != ""] or [i for i in later if known[i][1] == key[1]]
    if not found:
        known.append(key)
    return found[0] if found else len(known) - 1


def _limits(pieces: Sequence[PieceRows], order: Sequence[int]) -> list[int]:
    """Per piece the step from which its rows were recorded again later."""
    starts: dict[int, int] = {}
    for piece, session in zip(pieces, order, strict=True):
        steps = piece.steps[SCALARS]
        if steps.size:
            resumed = piece.part.resumed_at_step
            begin = min(int(steps[0]), resumed) if resumed >= 0 else int(steps[0])
            starts[session] = min(begin, starts.get(session, _NEVER))
    limits = []
    for index, (piece, session) in enumerate(zip(pieces, order, strict=True)):
        later = [start for other, start in starts.items() if other > session]
        later += [
            int(other.steps[SCALARS][0])
            for other, its in zip(pieces[index + 1 :], order[index + 1 :], strict=True)
            if its == session and other.part.rank == piece.part.rank and other.steps[SCALARS].size
        ]
        limits.append(min(later, default=_NEVER))
    return limits


def _held_back(
    pieces: Sequence[PieceRows], order: Sequence[int], limits: Sequence[int], live: Collection[int]
) -> list[int]:
    """Per piece the step from which a rank that is still recording has not committed its share."""
    last = max(order, default=0)
    reached: dict[int, int] = {}
    for piece, session, limit in zip(pieces, order, limits, strict=True):
        if session == last and not piece.sealed:
            steps = piece.steps[SCALARS]
            kept = steps[: int(np.searchsorted(steps, limit))]
            own = reached.setdefault(piece.part.rank, -1)
            reached[piece.part.rank] = int(kept[-1]) if kept.size else own
    # A live rank without a part in this session is not waited for: it may never begin one.
    behind = [step for rank, step in reached.items() if rank in live]
    horizon = min(behind) + 1 if behind and len(reached) > 1 else _NEVER
    return [
        horizon if session == last and not piece.sealed else _NEVER
        for piece, session in zip(pieces, order, strict=True)
    ]


def _stretch(
    pieces: Sequence[PieceRows], group: str, session: int, order: Sequence[int], limits: Sequence[int]
) -> Stretch:
    kept: dict[int, list[tuple[int, int]]] = {}
    for index, piece in enumerate(pieces):
        if order[index] == session and group in piece.steps:
            count = int(np.searchsorted(piece.steps[group], limits[index]))
            kept.setdefault(-1 if piece.sealed else piece.part.rank, []).append((index, count))
    strands = tuple(
        Strand(rank, tuple(parts), np.concatenate([pieces[index].steps[group][:count] for index, count in parts]))
        for rank, parts in sorted(kept.items())
    )
    if not strands:
        return Stretch(session, np.empty(0, np.int64), (), ())
    steps = united(strand.steps for strand in strands)
    return Stretch(session, steps, strands, tuple(_rows(strand.steps, steps) for strand in strands))


def _rows(own: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64] | None:
    if len(own) == len(steps):
        return None
    rows = np.full(len(steps), -1, np.int64)
    rows[np.searchsorted(steps, own)] = np.arange(len(own))
    return rows


def _describe(
    pieces: Sequence[PieceRows], session: int, order: Sequence[int], limits: Sequence[int], stretch: Stretch
) -> SessionInfo:
    own = [(piece, limit) for piece, its, limit in zip(pieces, order, limits, strict=True) if its == session]
    parts = [piece.part for piece, _ in own]
    cut = [piece.steps[SCALARS][int(np.searchsorted(piece.steps[SCALARS], limit)) :] for piece, limit in own]
    lost = np.setdiff1d(united(cut), stretch.steps, assume_unique=True) if any(map(len, cut)) else ()
    ranks = len({part.rank for part in parts})
    told = max(part.world_size for part in parts)
    return SessionInfo(
        session_id=parts[0].session_id,
        first_step=int(stretch.steps[0]) if stretch.steps.size else -1,
        last_step=int(stretch.steps[-1]) if stretch.steps.size else -1,
        resumed_at_step=max(part.resumed_at_step for part in parts),
        rows=len(stretch.steps),
        rows_cut=len(lost),
        world_size=max(ranks, told if told <= _MOST_RANKS else 1),
        parts=len(parts),
    )
