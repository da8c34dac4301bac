"""`FollowedRun`: one run as the dashboard reads it: opened once, followed while it is written, pooled incrementally.

Sits between `keelscope.store.reader.Run` and the HTTP interface. One lock per run, because a run file has one handle;
rows are read in bounded slices, so a long run never sits in memory as a whole.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from keelscope.errors import KeelscopeError, SeriesNotFoundError
from keelscope.store.lock import parts_folder
from keelscope.store.reader import open_run
from keelscope_dashboards.depth import run_axis
from keelscope_dashboards.drawn import BUDGET, Drawn, drawn_of, levels_between, no_levels, stacked
from keelscope_dashboards.levels import LayerAxis, Levels
from keelscope_dashboards.overviews import begin_from_overview
from keelscope_dashboards.panels import PANELS, Panel
from keelscope_dashboards.pooling import Band, Tile, band

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from keelscope.store.reader import Run

__all__ = ["Facts", "FollowedRun", "Status"]

Status = Literal["waiting", "live", "finished", "stopped", "error"]
ISOLATED = partial(open_run, isolated=True)  # one bad file must not take the others down
LONG = 1 << 22  # cells of a series from which one layer is read without the others


@dataclass(frozen=True, slots=True)
class Facts:
    """What the run list says about a run."""

    rows: int = 0
    head: int = -1
    planned: int = 0
    model: str = ""
    panels: tuple[Panel, ...] = ()


class FollowedRun:
    """A run file behind an opaque id.

    Args:
        path: the file.
        name: what the user sees.
        opener: how the file is opened.
    """

    def __init__(self, path: Path, name: str, *, opener: Callable[[Path], Run] = ISOLATED) -> None:
        self.path = path
        self.name = name
        self.error = ""
        self.revision = 0
        self.generation = 0
        """How often the file was opened anew: bins of different generations do not belong together."""
        self._opener = opener
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._stamp: tuple[int, int, int] = (0, 0, 0)
        self._drawn: dict[str, object] = {}  # Drawn by panel and layer; the budget takes out what is too much
        self._facts: tuple[int, Facts] = (-1, Facts())

    def opened(self) -> Run:
        """The run through a handle of its own, for long work that must not hold up the page; close it."""
        return self._opener(self.path)

    @contextmanager
    def reading(self) -> Iterator[Run]:
        """The run itself, for reading a few rows; nobody else reads it meanwhile.

        Yields:
            The run as of the last `poll`.

        Raises:
            SeriesNotFoundError: if the file cannot be read.
        """
        with self._lock:
            if self._run is None:
                raise SeriesNotFoundError(f"{self.name} cannot be read.")
            yield self._run

    def told(self, error: Exception | str) -> str:
        """What went wrong, without the folder the file lies in.

        Args:
            error: raised while the file was read, or a note on it.

        Returns:
            One sentence.
        """
        sentence = str(error).replace(str(self.path), self.path.name).replace(str(self.path.parent), "")
        return sentence or type(error).__name__

    @property
    def locked(self) -> threading.RLock:
        """Held while the file is read."""
        return self._lock

    @property
    def status(self) -> Status:
        """What the run is doing now; waiting until it has been looked at for the first time."""
        if self._run is None and not self.error and not self.revision:
            return "waiting"
        if self.error or self._run is None:
            return "error"
        if self._run.live:
            return "live"
        return "stopped" if self._run.stopped else "finished"

    def poll(self) -> None:
        """Open the run if needed and take in what was written since; a file that cannot be read says why in `error`.

        Never waits for whoever reads an open run at length: the next call takes in what is new.
        """
        with self._unless_busy() as free:
            if not free:
                return
            stamp = self._file_stamp()
            try:
                if self._run is None:
                    self._open(stamp)
                elif self._run.live or stamp != self._stamp:
                    self._follow(stamp)
            except (KeelscopeError, OSError, ValueError, KeyError) as error:
                self._fail(error, stamp)

    def close(self) -> None:
        """Release the file."""
        with self._lock:
            if self._run is not None:
                self._run.close()
            self._run = None
            BUDGET.forget(self._drawn)

    def facts(self) -> Facts:
        """The run in a few words, made anew only when the file has changed."""
        with self._unless_busy() as free:
            if free and self._run is not None and self._facts[0] != self.revision:
                self._facts = (self.revision, _facts(self._run))
            return self._facts[1] if self._run is not None else Facts()

    @contextmanager
    def _unless_busy(self) -> Iterator[bool]:
        """The lock if it is free, or as soon as it is where the run is not open yet; whether it is held."""
        held = self._lock.acquire(blocking=self._run is None)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def axis(self, panel: Panel) -> LayerAxis:
        """The layers of a panel."""
        with self._lock:
            return self._panel(panel).axis

    def tile(self, panel: Panel, *, seconds: float = math.inf) -> Tile:
        """The recorded rows of a panel, pooled to a bounded number of bins.

        Args:
            panel: one that the run holds.
            seconds: how long may be read; what is left comes with the next call, see `behind`.

        Returns:
            The tile, up to date with the last `poll` if there was time enough.

        Raises:
            SeriesNotFoundError: if the run does not hold the series.
        """
        with self._lock:
            return self._pooled(panel, None, seconds)

    def behind(self, panel: Panel) -> int:
        """How many recorded rows the tile of a panel does not hold yet, or not as finely as it will."""
        with self._lock, self.reading() as run:
            drawn, rows = self._panel(panel), len(run.steps_of(panel.group))
            return rows if drawn.coarse else rows - drawn.pool.seen

    def column(self, panel: Panel, layer: int) -> Tile:
        """All recorded rows of one layer, pooled; of a long run no more is read than the layer needs.

        Args:
            panel: one that the run holds.
            layer: index from 0 at the input side.

        Returns:
            A tile with one layer.
        """
        with self._lock:
            if self._is_long(panel):
                return self._pooled(panel, layer)
            return self._pooled(panel, None).of(layer)

    def _is_long(self, panel: Panel) -> bool:
        with self.reading() as run:
            rows = len(run.steps_of(panel.group)) if panel.group in run.groups else 0
        return rows * len(self._panel(panel).axis) > LONG

    def _pooled(self, panel: Panel, layer: int | None, seconds: float = math.inf) -> Tile:
        drawn, late = self._panel(panel, layer), time.monotonic() + seconds
        with self.reading() as run:
            begin_from_overview(run, drawn, hurried=seconds < math.inf)
            for levels in levels_between(run, drawn, drawn.pool.seen, None):
                drawn.pool.extend(levels)
                if time.monotonic() > late:
                    break
        BUDGET.use(self._drawn, _key(panel, layer), drawn.pool.tile.nbytes)
        return drawn.pool.tile

    def profile(self, panel: Panel, step: int) -> Levels:
        """The exact levels of all layers at the recorded step nearest to `step`.

        Args:
            panel: one that the run holds.
            step: any step.

        Returns:
            One row, or none if nothing is recorded.
        """
        with self._lock:
            drawn = self._panel(panel)
            with self.reading() as run:
                steps = run.steps_of(panel.group)
            if len(steps) == 0:
                return no_levels(len(drawn.axis))
            row = int(np.abs(steps - step).argmin())
            with self.reading() as run:
                return next(levels_between(run, drawn, row, row + 1))

    def history(self, panel: Panel, layer: int, bins: int) -> Band:
        """Level of one layer over all steps: the lowest and the highest of each of at most `bins` bins.

        Args:
            panel: one that the run holds.
            layer: index from 0 at the input side.
            bins: most bins wanted.

        Returns:
            Absolute decades per bin.
        """
        with self._lock:
            with self.reading() as run:
                pieces = list(levels_between(run, drawn_of(run, panel, self._panel(panel).axis, layer), 0, None))
            column = stacked(pieces) if pieces else no_levels(1)
            return band(column, max(1, -(-len(column.steps) // bins)))

    def _file_stamp(self) -> tuple[int, int, int]:
        """Inode, size and time of the file; the time is also that at which a part of the run came or went."""
        try:
            stat = self.path.stat()
        except OSError:
            return (0, 0, 0)
        folder = parts_folder(self.path)
        changed = folder.stat().st_mtime_ns if folder.is_dir() else 0
        return (stat.st_ino, stat.st_size, max(stat.st_mtime_ns, changed))

    def _open(self, stamp: tuple[int, int, int]) -> None:
        if self.error and stamp == self._stamp:
            return
        self._run = self._opener(self.path)
        self._stamp, self.error = stamp, ""
        BUDGET.forget(self._drawn)
        self.generation += 1
        self.revision += 1

    def _follow(self, stamp: tuple[int, int, int]) -> None:
        """Read on, or open anew when another file took the name, or one that nobody should write was changed."""
        run = self._run
        if run is None:
            return
        was_live = run.live
        if stamp[0] != self._stamp[0] or (not was_live and not run.stopped and stamp != self._stamp):
            self.close()
            self.error = ""
            self._open(stamp)
        else:
            before = run.history.generation
            if run.refresh() or was_live != run.live:
                self.revision += 1
            if run.history.generation != before:
                BUDGET.forget(self._drawn)
                self.generation += 1
        self._stamp = stamp

    def _fail(self, error: Exception, stamp: tuple[int, int, int]) -> None:
        self.close()
        sentence = self.told(error)
        if sentence != self.error:
            self.revision += 1
        self.error, self._stamp = sentence, stamp

    def _panel(self, panel: Panel, layer: int | None = None) -> Drawn:
        if self._run is None or panel.key not in self._run:
            raise SeriesNotFoundError(f"{self.name} does not hold {panel.key}.")
        drawn = self._drawn.get(_key(panel, layer))
        if not isinstance(drawn, Drawn):
            axis = run_axis(self._run, panel.key, panel.part) if layer is None else self._panel(panel).axis
            drawn = drawn_of(self._run, panel, axis, layer)
            self._drawn[_key(panel, layer)] = drawn
        BUDGET.use(self._drawn, _key(panel, layer), drawn.pool.tile.nbytes)
        return drawn


def _key(panel: Panel, layer: int | None) -> str:
    return panel.id if layer is None else f"{panel.id}|{layer}"


def _facts(run: Run) -> Facts:
    steps, config = run.steps, run.info.config
    planned = config.get("steps", 0)
    return Facts(
        rows=len(steps),
        head=int(steps[-1]) if len(steps) else -1,
        planned=planned if isinstance(planned, int) and 0 < planned < 2**53 else 0,
        model=str(config.get("scheme") or run.info.model_class),
        panels=tuple(panel for panel in PANELS if panel.key in run),
    )
