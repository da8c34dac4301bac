"""The command ``keelscope dash``. Dash and Flask are imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keelscope.errors import RunFileError, RunNotFoundError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_command"]


def add_command(app: typer.Typer) -> None:
    """Add ``dash`` to the command line.

    Args:
        app: the command line of keelscope.
    """
    app.command("dash")(dash)


def dash(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN|DIR]...", help="Run files and folders of runs; runs/ if omitted."),
    ] = None,
    *,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port; the next free one is taken.")] = 8050,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further host name that browsers may use; can be repeated.")
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser window.")] = True,
) -> None:
    """Show runs in the browser, also while they are being written."""
    _check(runs or [])
    _serve(runs or [Path("runs")], hosts=allowed_host or [], host=host, port=port, browser=browser)


def _check(named: Sequence[Path]) -> None:
    """Refuse paths that do not exist, and files that are no runs unless something else was named with them."""
    for path in named:
        if not path.exists():
            raise RunNotFoundError(f"{path} does not exist; name a run file or a folder of run files.")
    refused = [error for path in named if path.is_file() and (error := _refusal(path))]
    if refused and len(refused) == len(named):
        raise refused[0]
    for error in refused:
        sentence = f"{error.strerror}: {error.filename}." if error.filename is not None else str(error)
        typer.echo(f"keelscope: note: {sentence}", err=True)


def _refusal(path: Path) -> RunFileError | None:
    """Why a file cannot be opened as a run, None if it can."""
    from keelscope.store.reader import open_run

    try:
        open_run(path, isolated=True).close()
    except RunFileError as error:
        return error
    return None


def _serve(targets: Sequence[Path], *, hosts: Sequence[str], host: str, port: int, browser: bool) -> None:
    from keelscope_dashboards.app import create_app
    from keelscope_dashboards.index import RunIndex
    from keelscope_dashboards.server import allowed_hosts, serve
    from keelscope_dashboards.verdicts import Judge

    allowed = allowed_hosts(host, hosts)
    index, judge = RunIndex(targets), Judge()
    try:
        serve(create_app(index, judge, hosts=allowed).server, host=host, port=port, browser=browser, say=typer.echo)
    finally:
        judge.close()
        index.close()
