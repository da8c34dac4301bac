"""`Merged`: several parts of a run, of one rank or of many, read as one.

`timeline` says which rows count, `pieces` reads single parts, `across` says how ranks combine. Nothing is read before
it is asked for. `runfiles` opens the parts and looks for new rows; `seal` writes what is read here into one file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from keelscope.store.across import NEEDS_ALL, combined
from keelscope.store.names import ALL, GRADIENTS, TOTAL_NORM, WALL_TIME
from keelscope.store.pieces import Piece, Pieces
from keelscope.store.schema import SCALARS, RunLayout
from keelscope.store.timeline import PieceRows, Strand, Stretch, weave

__all__ = ["Merged"]

Values = NDArray[np.float64]
Seen = NDArray[np.bool_]
_Kind = TypeVar("_Kind", bound=np.generic)


class Merged:
    """A run as of one moment.

    Args:
        pieces: its parts: a sealed file first, then by rank and number.
        live: ranks that are being recorded.
        strict: raise when rows of a part cannot be read, instead of leaving them out and saying so.
        before: an earlier look at the same parts, whose layout is taken over.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        live: Collection[int] = (),
        *,
        strict: bool = False,
        before: Merged | None = None,
    ) -> None:
        self._pieces: Pieces = Pieces(pieces, strict=strict, before=None if before is None else before._pieces)
        names = (SCALARS, *self._pieces.groups)
        rows = [PieceRows(piece.source.layout.part, _steps_of(piece, names), piece.sealed) for piece in pieces]
        self.timeline = weave(rows, names, live)

    @property
    def layout(self) -> RunLayout:
        """Everything that one of the parts has."""
        return self._pieces.layout

    @property
    def damaged(self) -> tuple[str, ...]:
        """What could not be read so far, a sentence per file."""
        return self._pieces.damaged

    def steps(self, group: str) -> NDArray[np.int64]:
        """Steps of a group that count, ``[step]``.

        Args:
            group: name of a group or ``"scalars"``.

        Returns:
            A new array.
        """
        return self.timeline.steps(group)

    def read(self, group: str, name: str, start: int, stop: int, sites: slice = ALL) -> Values:
        """Rows of a statistic or scalar, combined over ranks.

        Args:
            group: name of the group.
            name: statistic or scalar.
            start: first row.
            stop: row after the last.
            sites: stretch of the site axis of a statistic.

        Returns:
            ``[step, ...]``; NaN where a part lacks the site or statistic, or a rank that is needed.
        """
        blocks = [
            self._of_scalar(stretch, name, first, last)
            if group == SCALARS
            else self._of_group(stretch, group, name, first, last, sites)
            for stretch, first, last in self.timeline.between(group, start, stop)
        ]
        return _joined(blocks, np.empty((0, *self._pieces.row_shape(group, name, sites))))

    def observed(self, group: str, start: int, stop: int, sites: slice = ALL, name: str = "") -> Seen:
        """Rows of which sites were seen by any rank.

        Args:
            group: name of the group.
            start: first row.
            stop: row after the last.
            sites: stretch of the site axis.
            name: a statistic: False where its value is unknown because a rank or a part lacks it.

        Returns:
            ``[step, site]``.
        """
        blocks = []
        for stretch, first, last in self.timeline.between(group, start, stop):
            blocks.append(self._observed(stretch, group, first, last, sites, name))
        return _joined(blocks, np.empty((0, self._pieces.n_sites(group, sites)), np.bool_))

    def of_strand(
        self, strand: Strand, group: str, name: str, start: int, stop: int, sites: slice = ALL
    ) -> tuple[Values, Seen]:
        """What one rank recorded in one session.

        Args:
            strand: from `timeline`.
            group: name of the group.
            name: statistic.
            start: first row of the strand.
            stop: row after the last.
            sites: stretch of the site axis.

        Returns:
            Values ``[step, site, ...]`` and which sites were seen, ``[step, site]``.
        """
        return self._values(strand, group, name, start, stop, sites), self._looked(strand, group, start, stop, sites)

    def expected_ranks(self, stretch: Stretch, group: str) -> int:
        """How many ranks should have recorded a group in a session.

        Args:
            stretch: rows of the group.
            group: its name.

        Returns:
            1 where ranks are equal or merged already, else the number of ranks.
        """
        merged = any(strand.rank < 0 for strand in stretch.strands)
        return 1 if merged or self._equal(group) else self.timeline.sessions[stretch.session].world_size

    def _of_group(self, stretch: Stretch, group: str, name: str, start: int, stop: int, sites: slice) -> Values:
        if len(stretch.strands) == 1 and self.expected_ranks(stretch, group) == 1:
            return self._values(stretch.strands[0], group, name, start, stop, sites)
        rule = self._rule(group, name)
        if self._equal(group) or not rule:
            return self._of_first(stretch, group, name, start, stop, sites)
        ranks = range(len(stretch.strands))
        values = np.stack([self._aligned(stretch, i, group, name, start, stop, sites) for i in ranks])
        whole = combined(rule, values, self._seen(stretch, group, start, stop, sites, name))
        if rule in NEEDS_ALL:
            whole[self._incomplete(stretch, group, start, stop)] = np.nan
        return whole

    def _observed(self, stretch: Stretch, group: str, start: int, stop: int, sites: slice, name: str) -> Seen:
        if len(stretch.strands) == 1 and self.expected_ranks(stretch, group) == 1:
            return self._looked(stretch.strands[0], group, start, stop, sites, name)
        by_rank = self._seen(stretch, group, start, stop, sites, name)
        seen = np.asarray(by_rank.any(axis=0))
        if not name or self._equal(group) or self._rule(group, name) not in NEEDS_ALL:
            return seen
        return seen & ~self._incomplete(stretch, group, start, stop)[:, None]

    def _of_first(self, stretch: Stretch, group: str, name: str, start: int, stop: int, sites: slice) -> Values:
        """What the first rank that saw a site recorded: its first holder, where each rank has a stage of the model."""
        whole = np.full((stop - start, *self._pieces.row_shape(group, name, sites)), np.nan)
        seen = self._seen(stretch, group, start, stop, sites, name)
        for index, own in enumerate(seen):
            new = own & ~seen[:index].any(axis=0)
            if new.any():
                whole[new] = self._aligned(stretch, index, group, name, start, stop, sites)[new]
        return whole

    def _of_scalar(self, stretch: Stretch, name: str, start: int, stop: int) -> Values:
        """Of the first rank that logged it; only the time is taken from another where that one is missing."""
        whole = self._aligned(stretch, 0, SCALARS, name, start, stop, ALL)
        others = range(1, len(stretch.strands))
        if name == WALL_TIME:
            for index in others:
                whole = np.where(np.isnan(whole), self._aligned(stretch, index, SCALARS, name, start, stop, ALL), whole)
        elif np.isnan(whole).all() and not self._logged(stretch.strands[0], name):
            first = next((index for index in others if self._logged(stretch.strands[index], name)), None)
            if first is not None:
                return self._aligned(stretch, first, SCALARS, name, start, stop, ALL)
            return self._total_norm(stretch.steps[start:stop]) if name == TOTAL_NORM else whole
        return whole

    def _logged(self, strand: Strand, name: str) -> bool:
        """Whether a rank has any number under that name: the loss of a pipeline is that of its last stage."""
        rows = sum(count for _, count in strand.pieces)
        return bool(np.isfinite(self._values(strand, SCALARS, name, 0, rows, ALL)).any())

    def _total_norm(self, steps: NDArray[np.int64]) -> Values:
        """Norm of all gradients, where no rank knows more than its share of them."""
        spec = self._pieces.groups.get(GRADIENTS)
        whole = np.full(len(steps), np.nan)
        if spec is None or spec.provenance.get("reduce") not in {"shard", "local"} or not len(steps):
            return whole
        own = self.steps(GRADIENTS)
        first, last = np.searchsorted(own, [steps[0], steps[-1] + 1])
        norms = self.read(GRADIENTS, "norm", int(first), int(last))  # [step, site]
        seen = self.observed(GRADIENTS, int(first), int(last), name="norm")
        total = np.sqrt(np.square(np.where(seen, norms, 0.0)).sum(axis=1))
        whole[np.isin(steps, own)] = np.where(seen.any(axis=1), total, np.nan)[np.isin(own[first:last], steps)]
        return whole

    def _seen(self, stretch: Stretch, group: str, start: int, stop: int, sites: slice, name: str) -> Seen:
        """``[rank, step, site]``."""
        blocks = []
        for strand, rows in zip(stretch.strands, stretch.rows, strict=True):
            has = _has(rows, start, stop)
            seen = np.zeros((stop - start, self._pieces.n_sites(group, sites)), np.bool_)
            first, last = _row_range(rows, start, stop)
            seen[has] = self._looked(strand, group, first, last, sites, name)
            blocks.append(seen)
        return np.stack(blocks)

    def _incomplete(self, stretch: Stretch, group: str, start: int, stop: int) -> Seen:
        return np.asarray(stretch.present()[start:stop] < self.expected_ranks(stretch, group))

    def _aligned(
        self, stretch: Stretch, index: int, group: str, name: str, start: int, stop: int, sites: slice
    ) -> Values:
        """Rows of one rank on the steps of all; NaN where it has none."""
        rows = stretch.rows[index]
        first, last = _row_range(rows, start, stop)
        own = self._values(stretch.strands[index], group, name, first, last, sites)
        if rows is None:
            return own
        whole = np.full((stop - start, *own.shape[1:]), np.nan)
        whole[_has(rows, start, stop)] = own
        return whole

    def _values(self, strand: Strand, group: str, name: str, start: int, stop: int, sites: slice) -> Values:
        blocks = [self._pieces.values(*at, group, name, sites) for at in _pieces_between(strand, start, stop)]
        return _joined(blocks, np.empty((0, *self._pieces.row_shape(group, name, sites))))

    def _looked(self, strand: Strand, group: str, start: int, stop: int, sites: slice, name: str = "") -> Seen:
        blocks = [self._pieces.seen(*at, group, name, sites) for at in _pieces_between(strand, start, stop)]
        return _joined(blocks, np.empty((0, self._pieces.n_sites(group, sites)), np.bool_))

    def _rule(self, group: str, name: str) -> str:
        return self._pieces.spec(group, name).across_ranks

    def _equal(self, group: str) -> bool:
        """Whether every rank records the same."""
        return self._pieces.groups[group].provenance.get("reduce") == "replica"


def _steps_of(piece: Piece, names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    own = {SCALARS, *(group.name for group in piece.source.layout.groups)}
    return {name: piece.source.steps(name) for name in names if name in own}


def _pieces_between(strand: Strand, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(piece, first row, row after the last) of the pieces that rows of a strand lie in."""
    found, begin = [], 0
    for index, count in strand.pieces:
        first, last = max(start - begin, 0), min(stop - begin, count)
        if first < last:
            found.append((index, first, last))
        begin += count
    return found


def _has(rows: NDArray[np.int64] | None, start: int, stop: int) -> Seen:
    return np.ones(stop - start, np.bool_) if rows is None else np.asarray(rows[start:stop] >= 0)


def _row_range(rows: NDArray[np.int64] | None, start: int, stop: int) -> tuple[int, int]:
    """The rows of a strand on some steps of its stretch; they follow each other."""
    if rows is None:
        return start, stop
    own = rows[start:stop]
    own = own[own >= 0]
    return (int(own[0]), int(own[-1]) + 1) if own.size else (0, 0)


def _joined(blocks: Sequence[NDArray[_Kind]], empty: NDArray[_Kind]) -> NDArray[_Kind]:
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks) if blocks else empty
