"""``keelscope doctor``: what a run file consists of, whether every number in it can be read, and repair."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keelscope.cli.output import print_json
from keelscope.errors import UsageError
from keelscope.formatting import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keelscope.store.examination import Examination, FileFinding

__all__ = ["add_command"]


def add_command(app: typer.Typer) -> None:
    """Add ``doctor`` to the application.

    Args:
        app: the application.
    """
    app.command("doctor", epilog="Example: keelscope doctor runs/keel.h5 --repair")(doctor)


def doctor(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files.")],
    repair: Annotated[
        bool, typer.Option("--repair", help="Seal runs that nobody writes; remove what a killed process left.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="Of a sealed run: exact, float32 (24 bits) or 10bit (relative error 2^-11).")
    ] = "exact",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run consists of and whether every number can be read. Exit code 1: damaged, or not repaired."""
    from keelscope.store.examination import FAILED, examined, repaired
    from keelscope.store.rounding import check_precision

    check_precision(precision)
    runs = [_named(run) for run in runs]
    before = [examined(run) for run in runs]
    done = [repaired(run, precision) if repair else [] for run in runs]
    found = [examined(run) for run in runs] if repair else before
    if json:
        print_json([_plain(one, said) for one, said in zip(found, done, strict=True)])
    else:
        print("\n\n".join("\n".join(_lines(one, said)) for one, said in zip(found, done, strict=True)))
    failed = any(sentence.startswith(FAILED) for said in done for sentence in said)
    if failed or not all(one.is_sound for one in found):
        raise typer.Exit(1)


def _named(run: Path) -> Path:
    """The file that a link leads to; the files beside it lie there, too."""
    run = run.resolve() if run.is_symlink() else run
    if run.is_dir():
        raise UsageError(f"{run} is a folder; give the path of a run file, such as {run / 'keel.h5'}.")
    return run


def _plain(found: Examination, done: list[str]) -> dict[str, object]:
    values = {**asdict(found), "path": str(found.path), "sound": found.is_sound}
    return {**values, "notes": list(found.history.notes), "done": done}


def _lines(found: Examination, done: list[str]) -> Iterator[str]:
    steps = f", steps {found.first_step} to {found.last_step}" if found.rows else ""
    alone = f", statistics on {found.recorded:,} of them" if found.recorded < found.rows else ""
    yield f"{found.path}: {found.state}, {count(found.rows, 'row')}{steps}{alone}"
    for session in found.history.sessions:
        resumed = f", went on at step {session.resumed_at_step}" if session.resumed_at_step >= 0 else ""
        cut = f", {count(session.rows_cut, 'row')} recorded again later" if session.rows_cut else ""
        ranks = f", {session.world_size} ranks" if session.world_size > 1 else ""
        name = session.session_id[:8] or "-"
        yield f"  session {name}: {count(session.rows, 'row')} in {count(session.parts, 'file')}{ranks}{resumed}{cut}"
    for file in found.files:
        yield f"  {file.name}: {', '.join(_about(file))}"
    yield from (f"  note: {note}" for note in found.history.notes)
    yield from (f"  left behind: {name}" for name in found.strays)
    yield from (f"  {sentence}" for sentence in done)
    yield "  Every number can be read." if found.is_sound else "  Something is damaged; what can be read is shown."


def _about(file: FileFinding) -> Iterator[str]:
    yield file.problem.rstrip(".") if file.problem else f"rank {file.rank}, part {file.part}, {file.state}"
    if not file.problem:
        yield count(file.rows, "row")
    yield f"{file.size:,} bytes"
    if file.rows_lost:
        yield f"{count(file.rows_lost, 'row')} lost while it was written"
    if file.merged:
        yield "already in the sealed file"
    if file.damaged:
        yield f"damaged: {', '.join(file.damaged)}"
