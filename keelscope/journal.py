"""Rows on their way to the run file: scalars join them, the first one decides the layout, order is kept.

`keelscope.session` adds values when a row closes and scalars when the user logs them; the journal creates the writer
(`keelscope.store`) when the first row is complete, since only then names and execution order are known.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from keelscope.coverage import Coverage
from keelscope.errors import RecordingWarning, RunExistsError, RunFileError, UsageError
from keelscope.layout import fitted, wider
from keelscope.store.destination import check_exists, expected, is_left
from keelscope.store.memory import MemoryWriter
from keelscope.store.names import clean
from keelscope.store.pace import Pace
from keelscope.store.reader import Run, open_run
from keelscope.store.schema import CoverageEntry, Later, Row, RunLayout
from keelscope.store.writer import RunWriter

__all__ = ["STANDARD_SCALARS", "Journal", "as_number", "check_destination"]

_log = logging.getLogger(__name__)

_LONGEST = 128

STANDARD_SCALARS = ("loss", "lr", "grad_norm_total", "tokens", "watch_ms")

Values = Mapping[str, Mapping[str, NDArray[np.float64]]]
Scalars = dict[str, float | None]
"""None of one that a group that waits will tell."""
_Pending = tuple[Values, Mapping[str, NDArray[np.bool_]], Mapping[str, Later]]
_NOTHING: _Pending = ({}, {}, {})
_NO_ROOM = "It came when the run had been given new places as often as a run file allows: nothing of it is recorded."


class Journal:
    """Pending rows by step, and the writer they go to.

    Args:
        path: run file, or None to keep the run in memory.
        exists: what to do if the file exists, see `keelscope.store.writer.RunWriter`.
        pace: when rows are written.
    """

    layout: Callable[[tuple[str, ...]], RunLayout]
    """Makes the layout from the scalar names when the first row is written."""
    hold: int = 0
    """How many steps a row waits before it is written, so that what is to be dropped can still be kept."""

    def __init__(self, path: str | Path | None, exists: str, pace: Pace | None = None) -> None:
        self._path, self._exists, self._pace = path, exists, pace
        self._writer: RunWriter | MemoryWriter | None = None
        self._values: dict[int, _Pending] = {}
        self._scalars: dict[int, Scalars] = {}
        self._known: tuple[str, ...] = ()
        self._names_known: frozenset[str] = frozenset()
        self._drawn: RunLayout
        self._spare: set[int] = set()
        self._written = self._due = -1
        self._late = self._full = self._stale = False
        self._opened: Run | None = None
        self._start = time.monotonic()
        self._clock: dict[int, float] = {}

    @property
    def path(self) -> Path | None:
        """The file that is written; before the first row the one that will be, unless another process is faster."""
        if self._writer is None and self._path is not None:
            return expected(Path(self._path).expanduser().absolute(), self._exists)
        return self._writer.path if isinstance(self._writer, RunWriter) else None

    def lacks(self, step: int, scalars: Scalars) -> Scalars:
        """Those scalars that the step does not have yet; none if it is written."""
        there = scalars if step <= self._written else self._scalars.get(step)
        return {name: value for name, value in scalars.items() if name not in there} if there else scalars

    def takes(self, name: str) -> bool:
        """Whether a scalar of that name can still be stored: new names cost a part of the file each time."""
        return not self._full or name in self._known

    def log(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Attach scalars to a step; too late for one that is written, which warns."""
        if step <= self._written:
            self._warn_late(step, scalars)
            return
        if step in self._scalars:
            self._scalars[step] |= scalars
        else:
            self._scalars[step] = dict(scalars)
        self._note_time(step)

    def _note_time(self, step: int) -> None:
        if step not in self._clock:
            self._clock[step] = time.monotonic() - self._start

    def add(
        self,
        step: int,
        values: Values,
        observed: Mapping[str, NDArray[np.bool_]] | None = None,
        later: Mapping[str, Later] | None = None,
        *,
        kept: bool = True,
    ) -> None:
        """Attach the values of a recorded step, which sites of each group were seen, and groups that wait.

        Those that are not `kept` are dropped when the row is written, unless `keep` is called before.
        """
        if not kept:
            self._spare.add(step)
        self._values[step] = values, observed or {}, later or {}
        self._note_time(step)

    def flush(self, before: int) -> None:
        """Hand every pending row of a step below `before` to the writer, in order; the last `hold` of them wait.

        Before the first recorded values nothing can be written: the layout is not known yet.
        """
        self._due = max(self._due, before)
        if self._values or self._scalars:
            self._write(before - self.hold)

    def keep(self, first: int, mark: Mapping[str, float]) -> None:
        """Keep the rows that wait and were to be dropped.

        Args:
            first: the first step of them.
            mark: scalars to attach to each.
        """
        for step in [step for step in self._spare if step >= first]:
            self._spare.remove(step)
            self.log(step, mark)

    def _write(self, before: int) -> None:
        if not self._values and (self._writer is None or not self._scalars):
            return
        alone = len(self._scalars) == 1 and self._values.keys() <= self._scalars.keys()  # as nearly always
        pending = list(self._scalars) if alone else sorted({*self._values, *self._scalars})
        for step in pending:
            if not self._written < step < before:
                continue
            scalars = self._scalars.pop(step, {})
            writer = self._writer or self._create(step, scalars)
            if self._stale or not scalars.keys() <= self._names_known:
                self._widen(writer, scalars)
                scalars = {name: value for name, value in scalars.items() if name in self._names_known}
            values, observed, later = self._values.pop(step, _NOTHING)
            if step in self._spare:
                self._spare.remove(step)
                values, observed, later = _NOTHING
            row = Row(step, self._clock.pop(step), values, scalars, observed, later)
            writer.append(fitted(row, self._drawn) if values else row)
            self._written = step

    def redraw(self) -> None:
        """The model has changed: what is written from now on may have more sites."""
        self._write(self._due)
        self._stale = self._writer is not None

    def told(self, coverage: Coverage) -> Coverage:
        """What was observed, and what is not recorded since it came when the run had no more room for new places.

        Args:
            coverage: what was observed, recorded or not.

        Returns:
            The same entries, some of them with another status.
        """
        if not self._full:
            return coverage
        placed = {(entry.path, entry.what) for entry in self._drawn.coverage}
        return Coverage(
            replace(entry, status="not_observed", reason=_NO_ROOM)
            if entry.status == "observed" and (entry.path, entry.what) not in placed
            else entry
            for entry in coverage
        )

    def close(self, coverage: Sequence[CoverageEntry] = ()) -> None:
        """Write what is pending, and what all rows have shown of each module and parameter, and close the file."""
        self.flush(1 << 62)
        if self._writer is not None:
            self._writer.cover(coverage)
            self._writer.close()

    def run(self) -> Run:
        """The run as recorded so far.

        Returns:
            The same read interface as `keelscope.open_run`.

        Raises:
            UsageError: before the first row is complete.
        """
        if self.hold:
            self._write(self._due)
        if self._writer is None:
            raise UsageError(
                "nothing is recorded yet: the first row is complete after a forward, a backward and an optimizer step "
                "(or watch.step())."
            )
        self._writer.flush()
        if isinstance(self._writer, MemoryWriter):
            return self._writer.run()
        if self._opened is None:
            self._opened = open_run(self._writer.path)
        self._opened.refresh()
        return self._opened

    def _create(self, step: int, scalars: Mapping[str, float | None]) -> RunWriter | MemoryWriter:
        self._know((*STANDARD_SCALARS, *self._names(scalars, STANDARD_SCALARS)))
        drawn = self.layout(self._known)
        self._drawn = replace(drawn, part=replace(drawn.part, first_step=step))
        path = self._path
        self._writer = MemoryWriter(self._drawn) if path is None else self._file_or_memory(path, self._drawn)
        return self._writer

    def _widen(self, writer: RunWriter | MemoryWriter, scalars: Mapping[str, float | None]) -> None:
        """Names that come late, all that are known of at once, or sites."""
        if self._full:
            return
        known = (*self._known, *self._names(scalars, self._known))
        drawn = replace(wider(self._drawn, self.layout(known)) if self._stale else self._drawn, scalars=known)
        self._stale = False
        if writer.change(drawn):
            self._know(known)
            self._drawn, self._opened = drawn, None
        else:
            self._full = True
            why = "too many names came late, and those that come from now on are left out without a word."
            message = f"{sorted(scalars.keys() - set(self._known)) or 'New sites'} are not recorded: {why}"
            warnings.warn(message, RecordingWarning, stacklevel=4)

    def _know(self, names: tuple[str, ...]) -> None:
        self._known, self._names_known = names, frozenset(names)

    def _names(self, scalars: Mapping[str, float | None], known: Iterable[str]) -> list[str]:
        pending = (name for logged in (scalars, *self._scalars.values()) for name in logged)
        return [name for name in dict.fromkeys(pending) if name not in set(known)]

    def _file_or_memory(self, path: str | Path, layout: RunLayout) -> RunWriter | MemoryWriter:
        """A disk that fails when the first row is complete may not stop a training that runs."""
        try:
            writer = self._open(path, layout)
        except (RunFileError, UsageError) as error:
            warnings.warn(
                f"{error} The run is kept in memory instead: read it from watch.run before the process ends.",
                RecordingWarning,
                stacklevel=7,
            )
            return MemoryWriter(layout)
        if writer.path.name != Path(path).name:
            _log.warning("keelscope: %s exists; this run is recorded to %s (watch.path)", path, writer.path.name)
        return writer

    def _open(self, path: str | Path, layout: RunLayout) -> RunWriter:
        try:
            return RunWriter(path, layout, exists=self._exists, pace=self._pace)  # type: ignore[arg-type]
        except RunExistsError:
            if self._exists != "resume":
                raise
            return RunWriter(path, layout, pace=self._pace)  # another process came first: better apart than lost

    def _warn_late(self, step: int, scalars: Mapping[str, float | None]) -> None:
        if not self._late:
            self._late = True
            warnings.warn(
                f"Scalars {sorted(scalars)} came after the row of step {step} was closed and are lost: log them "
                "before looking at watch.run, watch.calls or watch.gradients.",
                RecordingWarning,
                stacklevel=4,
            )


def check_destination(path: str | Path | None, exists: str, rank: int = 0) -> None:
    """Say at once, and not when the first row is complete, that a run file cannot be where the user wants it.

    Args:
        path: the run file, or None.
        exists: ``"new"``, ``"error"`` or ``"resume"``.
        rank: the rank that will write.

    Raises:
        UsageError: if `exists` is another word, or `path` is a folder.
        RunExistsError: if the file exists and may not, or is to be resumed while another process writes it.
        RunFileError: if its folder cannot be made.
    """
    check_exists(exists)
    if path is None:
        return
    file = Path(path).expanduser()
    if file.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a run file in it, such as {file / 'run.h5'}.")
    if exists == "error" and not rank and file.exists():  # the file may be this launch's: other ranks learn it later
        raise RunExistsError(f"{path} exists; choose another name, or exists='new' for the next free one.")
    if exists == "resume" and not is_left(file.absolute(), rank):
        raise RunExistsError(f"{path} is still being written; end that process, or take exists='new'.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFileError(f"The folder of {path} cannot be made: {error.strerror or error}.") from error


def as_number(name: str, value: object) -> float:
    """A logged scalar as a float.

    Args:
        name: its name, for the message.
        value: a number, or a tensor or array with one entry.

    Returns:
        The number; NaN and Inf are kept.

    Raises:
        UsageError: if it is not one real number, or the name cannot be stored as it is.
    """
    if not name or len(name) > _LONGEST or name != clean(name):
        raise UsageError(f"log({name[:_LONGEST]!r}): a name has 1 to {_LONGEST} characters, and no control characters.")
    number: float | None
    try:
        number = float(value.item() if hasattr(value, "item") else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None or (isinstance(value, str) and not math.isfinite(number)):
        shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
        raise UsageError(f"log({name}=...) takes one real number; got {type(value).__name__}{shape}.")
    return number
