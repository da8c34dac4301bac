"""How commands write: results to stdout or a file, progress and notes to stderr, JSON without NaN."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from keelscope.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from keelscope.store.reader import Run

__all__ = [
    "Row",
    "closed_pipe_is_fine",
    "exit_if_damaged",
    "invocation",
    "note",
    "print_json",
    "print_table",
    "stderr_console",
    "stdout_console",
    "to_json",
    "write",
]

PIPE_WIDTH = 120
LEAST_WIDTH = 40
_BAD_INPUT = 2
Row = Mapping[str, str]


def stdout_console() -> Console:
    """A console on stdout: coloured on a terminal, plain and as wide as ``COLUMNS`` says in a pipe.

    Returns:
        A new console on the present ``sys.stdout``.
    """
    return _console(stderr=False)


def stderr_console() -> Console:
    """A console on stderr, for progress.

    Returns:
        A new console on the present ``sys.stderr``.
    """
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    class Piped(Console):
        """A console that leaves a closed pipe to `closed_pipe_is_fine`, where rich would exit with 1."""

        def on_broken_pipe(self) -> NoReturn:
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    columns = os.environ.get("COLUMNS", "")
    piped = int(columns) if columns.isdecimal() and int(columns) >= LEAST_WIDTH else PIPE_WIDTH
    return Piped(stderr=stderr, highlight=False, emoji=False, width=None if stream.isatty() else piped)


@contextmanager
def closed_pipe_is_fine() -> Iterator[None]:
    """Let whoever reads stdout stop reading, as ``head`` does: the rest of the output goes nowhere, without an error.

    Yields:
        Nothing.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still buffered is flushed there when Python ends
        os.close(nowhere)


def invocation(program: str) -> str:
    """How the user can run keelscope again: its plain name if the shell finds it, else as it was run now.

    Args:
        program: ``sys.argv[0]``.

    Returns:
        A command to copy, without arguments.
    """
    path = Path(program)
    if path.name == "__main__.py":
        return "python -m keelscope"
    found = shutil.which(path.name)
    reached = found is not None and path.exists() and Path(found).resolve() == path.resolve()
    return path.name if reached or not path.exists() else os.path.relpath(path)


def exit_if_damaged(*runs: Run) -> None:
    """Say which numbers of runs could not be read, and end as for a file that cannot be opened.

    Args:
        runs: the runs, after they were read.

    Raises:
        Exit: with code 2, if any could not.
    """
    sentences = [sentence for run in runs for sentence in (*run.history.problems, *run.history.damaged)]
    for sentence in sentences:
        note(sentence)
    if sentences:
        raise typer.Exit(_BAD_INPUT)


def note(sentence: str) -> None:
    """Say something beside the result, on stderr.

    Args:
        sentence: the text.
    """
    print(f"keelscope: {sentence}", file=sys.stderr)


def print_table(rows: Sequence[Row]) -> None:
    """Print rows as a table with their keys as header.

    Args:
        rows: mappings with the same keys.
    """
    from rich import box
    from rich.table import Table

    if not rows:
        note("nothing is installed.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for key in rows[0]:
        table.add_column(key, no_wrap=key == "name", overflow="fold")
    for row in rows:
        table.add_row(*(value.replace("[", r"\[") for value in row.values()))
    stdout_console().print(table)


def to_json(value: object) -> str:
    """Standard JSON: NaN and infinities, which JSON cannot hold, become null and strings.

    Args:
        value: mappings, sequences, numbers and texts.

    Returns:
        The document, indented.

    Example:
        >>> print(to_json({"a": [1.0, float("nan"), float("-inf")]}))
        {
          "a": [
            1.0,
            null,
            "-inf"
          ]
        }
    """
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)


def print_json(value: object) -> None:
    """Print a value as JSON on stdout.

    Args:
        value: see `to_json`.
    """
    print(to_json(value))


def write(text: str, path: Path | None) -> None:
    """Write a result to a file, or to stdout.

    Args:
        text: the result.
        path: the file; None is stdout.

    Raises:
        UsageError: if the file cannot be written.
    """
    if path is None:
        print(text.rstrip("\n"))
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}.") from error
    note(f"wrote {path}.")


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
