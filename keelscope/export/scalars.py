"""Runs as scalars over steps, for TensorBoard and W&B: one curve per site, or a summary of the sites of a deep model.

A thousand curves per statistic help nobody, so above `MOST_SITES` sites a statistic becomes ``first``, ``last``,
``median``, ``min`` and ``max`` over its sites. `points` yields what the two writers and the integration `mirror` send.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from keelscope.export.selection import Selection
from keelscope.store.names import WALL_TIME
from keelscope.store.optional import needed
from keelscope.store.reader import Run
from keelscope.store.schema import SCALARS
from keelscope.store.series import Series

__all__ = ["MOST_SITES", "Sink", "TensorBoardSink", "WandbSink", "points", "write_tensorboard", "write_wandb"]

MOST_SITES = 24
"""Above this many sites a statistic is summarised."""


class Sink(Protocol):
    """Takes scalars."""

    def add(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """The scalars of one step; `seconds` since 1970."""

    def close(self) -> None:
        """Nothing more comes."""


def points(run: Run, selection: Selection, after: int = -1) -> Iterator[tuple[int, float, dict[str, float]]]:
    """The scalars of a run, step by step.

    Args:
        run: the run.
        selection: what of it; with a pattern on sites every matching site is a curve.
        after: only steps after this one.

    Yields:
        Step, seconds since 1970, and value by name. Statistics with further axes, such as quantiles, are left out.
    """
    asked = selection.steps
    first = max(asked.start or 0, after + 1) if asked.step is None else asked.start
    newer = replace(selection, steps=slice(first, asked.stop, asked.step))
    curves = [curve for key in selection.keys(run) for curve in _curves(run, key, newer)]
    recorded = np.unique(np.concatenate([np.zeros(0, np.int64), *(steps for _, steps, _ in curves)]))
    start, clock = _started(run), _clock(run)
    for step in recorded[recorded > after].tolist():
        values: dict[str, float] = {}
        for name, steps, column in curves:
            row = int(np.searchsorted(steps, step))
            if row < len(steps) and steps[row] == step and not np.isnan(column[row]):
                values[name] = float(column[row])
        if values:
            yield step, start + clock.get(step, 0.0), values


def _curves(run: Run, key: str, selection: Selection) -> list[tuple[str, NDArray[np.int64], NDArray[np.float64]]]:
    series = _selected(run, key, selection)
    if series.dims or key == f"{SCALARS}/{WALL_TIME}":
        return []
    if not series.sites:
        return [(key, series.steps, np.asarray(series.values, np.float64))]
    values = np.asarray(series.values, np.float64)
    if selection.sites != "*" or len(series.sites) <= MOST_SITES:
        return [(f"{key}/{path}", series.steps, values[:, site]) for site, path in enumerate(series.paths)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # steps on which no site was seen
        summary = {"median": np.nanmedian(values, axis=1), "min": np.nanmin(values, 1), "max": np.nanmax(values, 1)}
    summary |= {"first": values[:, 0], "last": values[:, -1]}
    return [(f"{key}/{name}", series.steps, column) for name, column in summary.items()]


def _selected(run: Run, key: str, selection: Selection) -> Series:
    group = key.partition("/")[0]
    recorded, wanted = run.steps_of(group), selection.steps
    first = 0 if wanted.start is None else int(np.searchsorted(recorded, wanted.start))
    last = len(recorded) if wanted.stop is None else int(np.searchsorted(recorded, wanted.stop))
    series = run.read(key, first, max(first, last))
    every = slice(None, None, wanted.step or 1)
    sites = selection.sites_of(run).get(group)
    values = series.values[every] if sites is None else series.values[every][:, sites]
    kept = series.sites if sites is None else tuple(series.sites[index] for index in sites)
    return Series(key, values, series.steps[every], kept, series.unit, series.doc, series.dims)


def _started(run: Run) -> float:
    try:
        return datetime.fromisoformat(run.info.created_at).timestamp()
    except ValueError:
        return 0.0


def _clock(run: Run) -> dict[int, float]:
    series = run[f"{SCALARS}/{WALL_TIME}"]
    return dict(zip(series.steps.tolist(), np.nan_to_num(series.values).tolist(), strict=True))


class TensorBoardSink:
    """Writes an event file that TensorBoard reads (needs tensorboard).

    Args:
        folder: the log folder.
    """

    def __init__(self, folder: str | Path) -> None:
        needed("tensorboard", "tensorboard")
        writer = needed("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer: Any = writer(str(folder))

    def add(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """Write the scalars of one step.

        Args:
            step: the step.
            seconds: since 1970.
            values: by name.
        """
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbSink:
    """Logs to an offline run of W&B (needs wandb); nothing is sent until you run ``wandb sync`` on it.

    Args:
        folder: where W&B keeps the run.
        name: of the run.
        config: stored with it.
    """

    def __init__(self, folder: str | Path, name: str = "", config: dict[str, object] | None = None) -> None:
        wandb = needed("wandb", "wandb")
        Path(folder).mkdir(parents=True, exist_ok=True)
        with _quiet():
            self._run: Any = wandb.init(
                project="keelscope",
                name=name or None,
                dir=str(folder),
                config=config or {},
                mode="offline",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    save_code=False,
                    host="unknown",
                    x_disable_meta=True,
                    x_disable_stats=True,
                ),
            )

    def add(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """Log the scalars of one step.

        Args:
            step: the step.
            seconds: since 1970.
            values: by name.
        """
        self._run.log({**values, "recorded_at": seconds}, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


@contextmanager
def _quiet() -> Iterator[None]:
    before = os.environ.get("WANDB_SILENT")
    os.environ["WANDB_SILENT"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_SILENT"]
        else:
            os.environ["WANDB_SILENT"] = before


def write_tensorboard(run: Run, selection: Selection, path: Path) -> int:
    """Write the scalars of a run for TensorBoard.

    Args:
        run: the run.
        selection: what of it.
        path: the log folder.

    Returns:
        How many numbers it holds.
    """
    with _disk_errors_once():
        return _send(run, selection, TensorBoardSink(path))


@contextmanager
def _disk_errors_once() -> Iterator[None]:
    """Keep the writer's thread from printing an error of the disk: the call that follows raises it."""
    usual = threading.excepthook

    def without_disk(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, OSError):
            usual(args)

    threading.excepthook = without_disk
    try:
        yield
    finally:
        threading.excepthook = usual


def write_wandb(run: Run, selection: Selection, path: Path) -> int:
    """Write the scalars of a run as an offline run of W&B; nothing is sent.

    Args:
        run: the run.
        selection: what of it.
        path: the folder.

    Returns:
        How many numbers it holds.
    """
    return _send(run, selection, WandbSink(path, run.info.title, dict(run.info.config)))


def _send(run: Run, selection: Selection, sink: Sink) -> int:
    count = 0
    try:
        for step, seconds, values in points(run, selection):
            sink.add(step, seconds, values)
            count += len(values)
    finally:
        sink.close()
    return count
