"""Values that need no conversion pass by typer's checks; all others are what typer makes of them."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from keelscope.cli.parameters import PlainCommand


class Colour(StrEnum):
    RED = "red"


def run(words: list[str], cls: type | None) -> tuple[int, str]:
    """Exit code and output of a command with options of every kind."""
    app = typer.Typer()

    @app.command(cls=cls)
    def show(
        word: str,
        number: Annotated[int, typer.Option(min=1)] = 2,
        share: float = 0.5,
        colour: Colour | None = None,
        place: Path | None = None,
        names: list[str] | None = None,
        loud: bool = False,
        told: Annotated[str, typer.Option(callback=lambda value: value.upper())] = "a",
    ) -> None:
        typer.echo([word, number, share, colour, place, names, loud, told])

    result = CliRunner().invoke(app, words)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    "words",
    [
        ["x"],
        [""],
        [],
        ["x", "y"],
        ["x", "--number", "3", "--share", "2", "--colour", "red", "--place", "a/b", "--loud", "--told", "b"],
        ["x", "--names", "a", "--names", "b"],
        ["x", "--number", "2"],
        ["x", "--number", "0"],
        ["x", "--number", "two"],
        ["x", "--colour", "blue"],
        ["--help"],
    ],
)
def test_it_is_what_typer_does(words):
    assert run(words, PlainCommand) == run(words, None)


def test_a_report_loads_only_what_it_needs(recorded):
    script = "import sys; from keelscope.cli import main; code = main(sys.argv[1:])\n"
    script += "print([name for name in ('pydantic', 'h5py', 'torch', 'tomllib') if name in sys.modules], code)"
    words = [sys.executable, "-c", script, "report", str(recorded / "keel.h5")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[] 0"
