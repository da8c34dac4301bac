"""``keelscope export``: a run file as CSV, Parquet, JSON, netCDF, or as scalars of TensorBoard or W&B."""

from __future__ import annotations

import shutil
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keelscope.cli.measuring import open_target
from keelscope.cli.output import exit_if_damaged, note, print_json
from keelscope.errors import UsageError

if TYPE_CHECKING:
    from keelscope.export import Selection
    from keelscope.store.reader import Run

__all__ = ["To", "add_command"]


class To(StrEnum):
    """What a run can be exported to."""

    CSV = "csv"
    PARQUET = "parquet"
    JSON = "json"
    NETCDF = "netcdf"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


def add_command(app: typer.Typer) -> None:
    """Add ``export`` to the application.

    Args:
        app: the application.
    """
    epilog = "Example: keelscope export runs/keel.h5 --to csv --series gradients/rms --sites 'blocks.3*'"
    app.command("export", epilog=epilog)(export)


def export(
    target: Annotated[str, typer.Argument(metavar="RUN", help="Run file.")],
    to: Annotated[To, typer.Option("--to", help="What to write.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="File or folder to make, - for stdout; default: beside the run."),
    ] = None,
    series: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="gradients, gradients/rms, '*/rms', ...; repeatable.")
    ] = None,
    sites: Annotated[str, typer.Option(help="Only sites whose path matches, e.g. 'blocks.3*'.")] = "*",
    steps: Annotated[str, typer.Option(metavar="FIRST:BEFORE[:EVERY]", help="Only these steps, e.g. 100:200.")] = "",
    wide: Annotated[
        bool, typer.Option("--wide/--long", help="A column per series and site, or a row per number.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """Export a run, or a part of it, for other programs."""
    from keelscope.export import Selection, export_run
    from keelscope.export.selection import parsed_steps

    selection = Selection(tuple(series or ["*"]), sites, parsed_steps(steps))
    with open_target(target) as run:
        if out == Path("-"):
            _to_stdout(run, to, selection, wide=wide)
        else:
            written = export_run(run, to.value, out, selection, wide=wide)
            if json:
                print_json({"path": str(written.path), "format": to.value, "numbers": written.numbers})
            else:
                note(f"wrote {written.path}, {written.numbers:,} numbers.")
        exit_if_damaged(run)


def _to_stdout(run: Run, to: To, selection: Selection, *, wide: bool) -> None:
    """Write a text format whole, then print it."""
    from keelscope.export import export_run

    if to not in (To.CSV, To.JSON):
        raise UsageError(f"--out - prints text; {to.value} is none. Use csv or json, or name a file.")
    with tempfile.TemporaryDirectory() as folder:
        written = export_run(run, to.value, Path(folder) / "run", selection, wide=wide)
        with written.path.open(encoding="utf-8", newline="") as file:
            shutil.copyfileobj(file, sys.stdout)
