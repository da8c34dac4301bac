"""Looks at every file of a run and reads every number in it: what is there, what is damaged, what can be tidied up.

``keelscope doctor`` prints it. Looking changes nothing; `repaired` seals a run that nobody writes and removes what
holds nothing of its own. A file that could hold rows is never deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from keelscope.errors import KeelscopeError, RunFileError, RunNotFoundError
from keelscope.store.filesource import FileSource
from keelscope.store.history import History
from keelscope.store.ledger import Ledger, part_key
from keelscope.store.lock import Writer, WriterLock, find_writer, noted_ranks, parts_folder
from keelscope.store.names import WALL_TIME
from keelscope.store.opening import FileState, file_state
from keelscope.store.parts import find_parts, place_of
from keelscope.store.runfiles import RunFiles
from keelscope.store.schema import SCALARS
from keelscope.store.sealing import Outcome, remove_merged, seal, stray_drafts
from keelscope.store.series import united

__all__ = ["Examination", "FileFinding", "examined", "repaired"]

State: TypeAlias = Literal["being recorded", "being sealed", "stopped", "finished", "sealed", "unreadable"]
_ROWS = 4096
_NO_PART = 2**30


@dataclass(frozen=True, slots=True)
class FileFinding:
    """One file of a run."""

    name: str
    rank: int
    part: int
    state: str
    """``"closed"``, ``"live"``, ``"dead"`` (its writer was killed), or ``"damaged"`` where it cannot be opened."""
    session: str = ""
    rows: int = 0
    rows_lost: int = 0
    """Rows that the writer had to drop, for example because the disk was full."""
    size: int = 0
    """Bytes."""
    merged: bool = False
    """Whether the sealed file holds all of it."""
    damaged: tuple[str, ...] = ()
    """Datasets that cannot be read to the end."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found."""

    path: Path
    state: State
    files: tuple[FileFinding, ...]
    history: History
    rows: int = 0
    first_step: int = -1
    last_step: int = -1
    recorded: int = 0
    """Rows with statistics; the others hold logged scalars alone."""
    strays: tuple[str, ...] = ()
    """Temporary files and notes that a process left behind."""

    @property
    def is_sound(self) -> bool:
        """Whether every number of every file could be read."""
        return all(not file.problem and not file.damaged for file in self.files) and bool(self.files)


def examined(path: Path) -> Examination:
    """Read everything there is of a run.

    Args:
        path: the named file.

    Returns:
        What was found; a damaged file is a finding and no error.

    Raises:
        RunNotFoundError: if there is no such run.
    """
    path = path.expanduser()
    parts = find_parts(path)
    if not path.exists() and not parts:
        raise RunNotFoundError(f"there is no run file {path}.")
    files = [path, *parts.values()] if path.exists() else list(parts.values())
    ledger = _ledger_of(path)
    findings = tuple(_look_at(file, ledger) for file in files)
    strays = tuple(_strays(path))
    try:
        run = RunFiles(path)
    except RunFileError as error:
        return Examination(path, "unreadable", findings, History(problems=(str(error),)), strays=strays)
    steps = run.steps(SCALARS)
    span = (len(steps), int(steps[0]), int(steps[-1])) if steps.size else (0, -1, -1)
    recorded = len(united(run.steps(group.name) for group in run.layout.groups)) if run.layout.groups else 0
    for name in dict.fromkeys(name for finding in findings for name in finding.damaged):
        _read_damaged(run, *name.split("/", 1))
    state, history = _state(path, run), run.history
    run.close()
    return Examination(path, state, findings, history, *span, recorded, strays)


FAILED = ("The run was not sealed", "Nothing was tidied up")
"""How sentences of `repaired` begin that tell of something that went wrong."""


def repaired(path: Path, precision: str = "exact") -> list[str]:
    """Seal a run that nobody writes, and remove what was left behind.

    Args:
        path: the named file.
        precision: see `sealing.seal`.

    Returns:
        What was done and what was not, a sentence each.
    """
    path = path.expanduser().absolute()
    if _writers(path):
        return ["Nothing was changed: the run is being written."]
    done = [_sealed(path, precision)]
    try:
        removed = _tidied(path)
    except OSError as error:
        return [*done, f"Nothing was tidied up: {error.strerror or error}."]
    return [*done, *(f"Removed {name}, which held nothing of its own." for name in removed)]


def _sealed(path: Path, precision: str) -> str:
    try:
        made = seal(path, precision, incomplete=True)
    except (KeelscopeError, OSError) as error:
        return f"The run was not sealed: {str(error).rstrip('.')}. No file was changed."
    if made.outcome is Outcome.SEALED:
        return f"Sealed into one file: {made.bytes_before:,} bytes became {made.bytes_after:,}."
    return f"Not sealed: {made.outcome.value}."


def _tidied(path: Path) -> list[str]:
    """Under the locks of all ranks: leftovers of sealing go, stale locks and notes too."""
    ranks = sorted({0, *(rank for rank, _ in find_parts(path)), *noted_ranks(path)})
    strays = _strays(path)
    with ExitStack() as stack:
        for rank in ranks:
            stack.callback(WriterLock(path, rank, first_part=_NO_PART, sealing=True).release)
        gone = remove_merged(path) if _ledger_of(path) is not None else []
        for draft in stray_drafts(path):
            draft.unlink(missing_ok=True)
    return [*(part.name for part in gone), *(name for name in strays if not (parts_folder(path) / name).exists())]


def _state(path: Path, run: RunFiles) -> State:
    if run.live:
        return "being recorded"
    if Writer.SEALING in _writers(path.absolute()):
        return "being sealed"
    if run.stopped:
        return "stopped"
    return "sealed" if run.history.sealed else "finished"


def _writers(path: Path) -> set[Writer]:
    ranks = {0, *(rank for rank, _ in find_parts(path)), *noted_ranks(path)}
    return {find_writer(path, rank) for rank in ranks} - {Writer.GONE}


def _ledger_of(path: Path) -> Ledger | None:
    try:
        source = FileSource(path)
    except RunFileError:
        return None
    source.close()
    return source.ledger


def _look_at(file: Path, ledger: Ledger | None) -> FileFinding:
    _, rank, part = place_of(file)
    size = file.stat().st_size
    try:
        source, state = FileSource(file), file_state(file)
    except RunFileError as error:
        return FileFinding(file.name, rank, part, "damaged", size=size, problem=str(error))
    own = source.layout.part
    lost, damaged = 0, list(_damaged(source))
    try:
        lost = int(source.extras.status()[3])
    except (RunFileError, ValueError, OverflowError):
        damaged.append("status")
    merged = ledger is not None and source.ledger is None and part_key(own) in ledger.parts
    rows = len(source.steps(SCALARS))
    source.close()
    names = {FileState.CLOSED: "closed", FileState.DEAD: "dead"}
    return FileFinding(
        file.name,
        own.rank,
        own.part,
        names.get(state, "live"),
        own.session_id,
        rows,
        lost,
        size,
        merged,
        tuple(damaged),
    )


def _damaged(source: FileSource) -> Iterator[str]:
    """Datasets of which some chunk cannot be read."""
    columns = {SCALARS: [*source.layout.scalars, WALL_TIME]}
    columns |= {group.name: [spec.name for spec in group.statistics] for group in source.layout.groups}
    for group, names in columns.items():
        rows = len(source.steps(group))
        for name in names:
            try:
                for start in range(0, rows, _ROWS):
                    source.read(group, name, start, min(rows, start + _ROWS))
                    if group != SCALARS:
                        source.observed(group, start, min(rows, start + _ROWS), name=name)
            except RunFileError:
                yield f"{group}/{name}"


def _read_damaged(run: RunFiles, group: str, name: str = "") -> None:
    """Read all of a damaged series, so that the history of the run says on which steps it is."""
    if name and group in {SCALARS, *(spec.name for spec in run.layout.groups)}:
        rows = len(run.steps(group))
        for start in range(0, rows, _ROWS):
            run.read(group, name, start, min(rows, start + _ROWS))
            if group != SCALARS:
                run.observed(group, start, min(rows, start + _ROWS), name=name)


def _strays(path: Path) -> list[str]:
    """Drafts of sealed files, and locks and notes that nobody holds."""
    notes = []
    for rank in noted_ranks(path):
        if find_writer(path.absolute(), rank) is Writer.GONE:
            notes += [f"r{rank:05d}.{kind}" for kind in ("lock", "json")]
    found = [name for name in notes if (parts_folder(path) / name).exists()]
    made = sorted(file.name for file in parts_folder(path).glob("*.tmp"))  # they may be copies of rows: not removed
    return [*(draft.name for draft in stray_drafts(path)), *found, *made]
