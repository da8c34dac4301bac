"""The formats a run can be exported to; a new one is one entry of `FORMATS`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from keelscope.errors import UnknownNameError, UsageError
from keelscope.export.netcdf import write_netcdf
from keelscope.export.scalars import write_tensorboard, write_wandb
from keelscope.export.selection import Selection
from keelscope.export.tables import write_csv, write_json, write_parquet
from keelscope.store.reader import Run

__all__ = ["FORMATS", "Exported", "Format", "export_run"]


Write: TypeAlias = Callable[[Run, Selection, Path], int]


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write a run."""

    name: str
    suffix: str
    """Of the file; empty for a folder."""
    meaning: str
    write: Write
    """Writes a selection and says how many numbers that were."""
    write_wide: Write | None = None
    """The same as a table with a column per series and site."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    numbers: int


FORMATS = {
    form.name: form
    for form in (
        Format("csv", ".csv", "text, a row per number", write_csv, lambda *what: write_csv(*what, wide=True)),
        Format("parquet", ".parquet", "a column store", write_parquet, lambda *what: write_parquet(*what, wide=True)),
        Format("json", ".json", "standard JSON, an entry per series", write_json),
        Format("netcdf", ".nc", "labelled arrays, a group per probe", write_netcdf),
        Format("tensorboard", "", "scalars in an event file", write_tensorboard),
        Format("wandb", "", "scalars in an offline run of W&B", write_wandb),
    )
}


def export_run(
    run: Run, form: str, path: str | Path | None = None, selection: Selection | None = None, *, wide: bool = False
) -> Exported:
    """Write a run, or a part of it, for another program.

    Args:
        run: an open run.
        form: ``"csv"``, ``"parquet"``, ``"json"``, ``"netcdf"``, ``"tensorboard"`` or ``"wandb"``.
        path: the file or folder to make; None takes the name of the run with the suffix of the format.
        selection: which series, sites and steps; None means all.
        wide: a row per step and a column per series and site, where a format knows both.

    Returns:
        Where it is, and how many numbers it holds.

    Raises:
        UnknownNameError: if there is no such format, or the selection matches nothing.
        UsageError: if a library is missing, the file exists or cannot be written, or the format has no wide form.
    """
    if form not in FORMATS:
        raise UnknownNameError(f"there is no format {form!r}; formats are {', '.join(FORMATS)}.")
    chosen = FORMATS[form]
    write = chosen.write_wide if wide else chosen.write
    if write is None:
        raise UsageError(f"{form} has no wide form; csv and parquet have.")
    target = Path(path) if path is not None else _named(run, chosen)
    if target.exists() and not (chosen.suffix == "" and target.is_dir()):
        raise UsageError(f"{target} exists and is left as it is; name another file with --out.")
    what = selection or Selection()
    what.check_steps(run)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Exported(target, _whole(write, run, what, target) if chosen.suffix else write(run, what, target))
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror or error}.") from error


def _whole(write: Write, run: Run, selection: Selection, target: Path) -> int:
    """Write under another name first, so that a file of this name is a whole one."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        numbers = write(run, selection, unfinished)
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return numbers


def _named(run: Run, form: Format) -> Path:
    stem = run.path or Path("run")
    return stem.with_suffix(form.suffix) if form.suffix else stem.with_name(f"{stem.stem}-{form.name}")
