"""``keelscope compare``: two to eight runs side by side, layer by layer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keelscope.cli.output import print_json, stdout_console
from keelscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MOST", "add_command", "show_comparison"]

MOST = 8
"""Runs that fit side by side."""


def add_command(app: typer.Typer) -> None:
    """Add ``compare`` to the application.

    Args:
        app: the application.
    """
    app.command("compare", epilog="Example: keelscope compare runs/keel.h5 runs/post_ln.h5")(compare_runs)


def compare_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Run files, 2 to 8.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the gradient flow of 2 to 8 runs, layer by layer at equal relative depth."""
    if not 2 <= len(runs) <= MOST:
        raise UsageError(f"compare takes 2 to {MOST} runs, not {len(runs)}; use keelscope report for one.")
    show_comparison(runs, json=json)


def show_comparison(paths: Sequence[Path], *, json: bool = False) -> None:
    """Diagnose runs and print them side by side; a single one is printed as a report.

    Args:
        paths: run files.
        json: print JSON instead of tables.
    """
    from keelscope.diagnosis import compare, diagnose
    from keelscope.store.reader import open_run
    from keelscope.terminal import render

    with ExitStack() as stack:
        reports = [diagnose(stack.enter_context(open_run(path))) for path in paths]
        shown = compare(*reports) if len(reports) > 1 else reports[0]
        if json:
            print_json(shown.to_dict())
        else:
            render(shown, stdout_console())
