"""What a run is made of: its sessions, the ranks that are missing, and what of it could not be read.

`merged` and `ledger` fill these records, `reader.Run` shows them. A run that one process wrote in one go has one
session and nothing to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Absence", "History", "SessionInfo"]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One process, or one group of processes, that recorded a stretch of a run."""

    session_id: str
    first_step: int = -1
    """First step of it that counts; -1 if none does."""
    last_step: int = -1
    resumed_at_step: int = -1
    """Where it went on with an earlier session, -1 for the first."""
    rows: int = 0
    """Recorded steps that count."""
    rows_cut: int = 0
    """Recorded steps that a later session overtook."""
    world_size: int = 1
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Absence:
    """A rank that recorded nothing on some steps of a session."""

    rank: int
    steps: int
    """How many recorded steps miss it."""
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class History:
    """The sessions of a run and what there is to say about them."""

    sessions: tuple[SessionInfo, ...] = ()
    absences: tuple[Absence, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read, a sentence each."""
    generation: int = 0
    """Grows when rows that could be read before have changed: a session overtook them, or a file came or went."""
    sealed: bool = False
    """Whether the run is one finished, compressed file."""
    rows_lost: int = 0
    """Rows that could not be written, for example because the disk was full."""
    damaged: tuple[str, ...] = ()
    """Rows that are there and could not be read so far, a sentence per file."""

    @property
    def rows_cut(self) -> int:
        """Recorded steps that later sessions overtook."""
        return sum(session.rows_cut for session in self.sessions)

    @property
    def notes(self) -> tuple[str, ...]:
        """Everything a reader of the numbers has to know, a sentence each.

        Example:
            >>> History(absences=(Absence(3, 20, 40, 59),)).notes
            ('Rank 3 recorded nothing on 20 steps (40 to 59): sums over ranks are unknown there.',)
        """
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        yield from (*self.problems, *self.damaged)
        for absent in self.absences:
            steps = "1 step" if absent.steps == 1 else f"{absent.steps} steps"
            where = f"{absent.first}" if absent.first == absent.last else f"{absent.first} to {absent.last}"
            yield f"Rank {absent.rank} recorded nothing on {steps} ({where}): sums over ranks are unknown there."
        if self.rows_lost:
            rows = "1 row was" if self.rows_lost == 1 else f"{self.rows_lost} rows were"
            yield f"{rows} lost while the run was recorded: they could not be written (was the disk full?)."
        if self.rows_cut:
            rows = "1 row" if self.rows_cut == 1 else f"{self.rows_cut} rows"
            yield f"{rows} of earlier sessions were recorded again by a later one and left out."
