"""`RunFiles`: serves a `Run` from all the files that it consists of, in whatever state each of them is.

`parts` names them, `filesource` reads one, `merged` puts them together. A part that cannot be read is left out and
said. While the run is recorded, `refresh` finds new rows and new parts; when it has been sealed, it goes on with the
sealed file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keelscope.errors import NotARunFileError, RunFileError, RunNotFoundError, UnsupportedSchemaError, UsageError
from keelscope.store.filesource import FileSource
from keelscope.store.history import Absence, History, SessionInfo
from keelscope.store.ledger import Ledger, part_key
from keelscope.store.lock import Writer, find_writer, noted_ranks
from keelscope.store.merged import Merged
from keelscope.store.names import ALL
from keelscope.store.overview import Overview
from keelscope.store.parts import find_parts, place_of
from keelscope.store.pieces import Piece
from keelscope.store.schema import RunLayout

__all__ = ["RunFiles"]

_Stamp = tuple[int, tuple[Path, ...]]
"""What tells that files came or went: inode of the run file, names of the parts."""


class RunFiles:
    """A `source.RunSource` on all parts of a run.

    Args:
        path: the file that was named when recording.
        strict: raise when a part cannot be read, instead of leaving it out and saying so.

    Raises:
        RunNotFoundError: if there is no such file.
        NotARunFileError: if no part can be read.
        UnsupportedSchemaError: if a newer major version wrote one.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self._path = path
        self._strict = strict
        self._generation = 0
        self._closed = False
        self._sources, self._problems, self._seen = self._open()
        self._ledger, self._live = self._find_ledger(), self._find_live()
        self._merged = self._fresh(None)
        self._told = self._tell()
        self._rows_lost = sum(map(_lost, self._sources))

    @property
    def layout(self) -> RunLayout:
        """What is recorded, by any part."""
        return self._merged.layout

    @property
    def live(self) -> bool:
        """Whether a process was recording when the run was last looked at."""
        return bool(self._live) or any(source.live for source in self._sources)

    @property
    def stopped(self) -> bool:
        """Whether the process that recorded last ended without closing its file."""
        last = {source.layout.part.rank: source for source in self._sources}
        return not self.live and any(source.stopped for source in last.values())

    @property
    def history(self) -> History:
        """Sessions, missing ranks, and what could not be read."""
        sealed = self._ledger is not None and len(self._sources) == 1
        damaged = self._merged.damaged
        return History(*self._told, tuple(self._problems), self._generation, sealed, self._rows_lost, damaged)

    @property
    def merged(self) -> Merged:
        """The parts as of the last refresh, put together."""
        return self._merged

    @property
    def sources(self) -> Sequence[FileSource]:
        """The parts that can be read, each by itself."""
        return self._sources

    def steps(self, group: str) -> NDArray[np.int64]:
        """Steps of a group that count, as of the last refresh.

        Args:
            group: name of the group.

        Returns:
            ``[step]``.
        """
        return self._merged.steps(group)

    def read(self, group: str, name: str, start: int, stop: int, sites: slice = ALL) -> NDArray[np.float64]:
        """Rows of a statistic or scalar, see `Merged.read`."""
        self._check_open()
        return self._merged.read(group, name, start, stop, sites)

    def observed(self, group: str, start: int, stop: int, sites: slice = ALL, name: str = "") -> NDArray[np.bool_]:
        """Rows of which sites were seen, see `Merged.observed`."""
        self._check_open()
        return self._merged.observed(group, start, stop, sites, name)

    def overview(self, group: str, name: str, factor: int, sites: slice = ALL) -> Overview | None:
        """A statistic in fewer rows, where the run is one sealed file that holds it, see `FileSource.overview`."""
        self._check_open()
        return self._sources[0].overview(group, name, factor, sites) if len(self._sources) == 1 else None

    def refresh(self) -> bool:
        """Look for new rows and parts.

        Returns:
            True if there are any.
        """
        if self._closed:
            return False
        if self._stamp() != self._seen:
            return self._reopen()
        grown = [source.refresh() for source in self._sources]
        live = self._find_live()
        if any(grown) or live != self._live:
            self._live = live
            return self._look(self._merged)
        return False

    def close(self) -> None:
        """Close every file."""
        self._closed = True
        _close(self._sources)

    def _open(self, attempts: int = 3) -> tuple[list[FileSource], list[str], _Stamp]:
        """Open what there is; when a file goes meanwhile, because the run is being sealed, look again."""
        seen = self._stamp()
        try:
            return *_opened(self._path, strict=self._strict), seen
        except RunNotFoundError:
            if attempts > 1 and self._stamp() != seen:
                return self._open(attempts - 1)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self._path} was closed; open it again with keelscope.open_run.")

    def _reopen(self) -> bool:
        before, sources = self._merged, self._sources
        self._sources, self._problems, self._seen = self._open()
        _close(sources)
        self._ledger, self._live = self._find_ledger(), self._find_live()
        return self._look(before)

    def _look(self, before: Merged) -> bool:
        self._merged = self._fresh(before)
        self._told = self._tell()
        self._rows_lost = sum(map(_lost, self._sources))
        return self._compare(before)

    def _compare(self, before: Merged) -> bool:
        """Whether rows came; if what was there has changed, it is another generation."""
        now = self._merged
        names = ("scalars", *(group.name for group in before.layout.groups))
        if not all(_goes_on(before.steps(name), now, name) for name in names) or before.layout != now.layout:
            self._generation += 1
            return True
        return any(len(before.steps(name)) != len(now.steps(name)) for name in names)

    def _tell(self) -> tuple[tuple[SessionInfo, ...], tuple[Absence, ...]]:
        """Sessions and missing ranks; of a sealed file that was overtaken since, as far as it still counts."""
        timeline, ledger = self._merged.timeline, self._ledger
        sessions, absences = timeline.sessions, tuple(timeline.absences())
        if ledger is None:
            return sessions, absences
        earlier, lost = ledger.absences, sessions[0].rows_cut
        if lost and earlier:
            sealed = next(source for source in self._sources if source.ledger is not None)
            earlier = sealed.extras.absences(sessions[0].rows)
        return (*_cut(ledger, lost), *sessions[1:]), (*earlier, *absences)

    def _fresh(self, before: Merged | None) -> Merged:
        pieces = [Piece(source, source.ledger is not None) for source in self._sources]
        return Merged(pieces, self._live, strict=self._strict, before=before)

    def _find_ledger(self) -> Ledger | None:
        return next((source.ledger for source in self._sources if source.ledger is not None), None)

    def _find_live(self) -> frozenset[int]:
        """Ranks that a process records now, also those that have no part yet."""
        path, parts = self._path.absolute(), {rank: part for _, rank, part in map(place_of, self._paths())}
        ranks = {*parts, *noted_ranks(path)}
        nobody = {Writer.GONE, Writer.SEALING}
        return frozenset(rank for rank in ranks if find_writer(path, rank, parts.get(rank)) not in nobody)

    def _paths(self) -> list[Path]:
        return [source.path for source in self._sources]

    def _stamp(self) -> _Stamp:
        try:
            inode = self._path.lstat().st_ino
        except OSError:
            inode = 0
        return inode, tuple(find_parts(self._path).values())


def _opened(path: Path, *, strict: bool) -> tuple[list[FileSource], list[str]]:
    """Every part that can be read and is not merged yet, and what is wrong with the others."""
    parts = {(0, 0): path, **find_parts(path)}
    sources: list[FileSource] = []
    errors: list[RunFileError] = []
    for file in (parts[key] for key in sorted(parts)):
        try:
            sources.append(FileSource(file))
        except RunFileError as error:
            gone = isinstance(error, RunNotFoundError) and file != path  # sealed meanwhile
            if strict or gone or len(parts) == 1 or isinstance(error, UnsupportedSchemaError):
                _close(sources)
                raise
            errors.append(error)
    if not sources:
        raise errors[0]
    kept, late = _unmerged(sources)
    if late and strict:
        _close(sources)
        raise NotARunFileError(late[0])
    return kept, [*(_left_out(error) for error in errors), *late]


def _unmerged(sources: list[FileSource]) -> tuple[list[FileSource], list[str]]:
    """Without what a sealed file holds already: left when sealing was killed while it cleaned up."""
    # A part of a session that was sealed without it cannot be merged any more; it takes nothing away, and is said.
    ledger = sources[0].ledger
    if ledger is None:
        return sources, []
    known = {session.session_id for session in ledger.sessions} - {""}
    fresh = [s for s in sources[1:] if part_key(s.layout.part) not in ledger.parts]
    late = [source for source in fresh if source.layout.part.session_id in known]
    kept = [sources[0], *(source for source in fresh if source not in late)]
    _close([source for source in sources if source not in kept])
    said = "A part is left out: {} was recorded by rank {} after its session had been sealed; open it by itself."
    return kept, [said.format(source.path, source.layout.part.rank) for source in late]


def _left_out(error: RunFileError) -> str:
    reason = f"{error.strerror}: {Path(str(error.filename)).name}" if error.filename else str(error).rstrip(".")
    return f"A part is left out: {reason}."


def _close(sources: Sequence[FileSource]) -> None:
    for source in sources:
        source.close()


def _goes_on(steps: NDArray[np.int64], now: Merged, name: str) -> bool:
    found = now.steps(name) if name in now.timeline.stretches else steps[:0]
    return np.array_equal(steps, found[: len(steps)])


def _cut(ledger: Ledger, rows_cut: int) -> list[SessionInfo]:
    """Sessions of a sealed file, the last of which may have been overtaken since."""
    sessions = list(ledger.sessions)
    for index in reversed(range(len(sessions))):
        taken = min(rows_cut, sessions[index].rows)
        sessions[index] = replace(
            sessions[index], rows=sessions[index].rows - taken, rows_cut=sessions[index].rows_cut + taken
        )
        rows_cut -= taken
    return sessions


def _lost(source: FileSource) -> int:
    """Rows that the writer of one file could not write; 0 where that cannot be read any more."""
    try:
        return max(0, int(source.extras.status()[3]))
    except (OSError, ValueError, OverflowError):
        return 0
