"""Write the pages that say what the program says of itself: docs/cli.md and docs/catalogue.md.

``make pages`` runs it, after a command, a probe or a rule has changed; a test compares the pages with what it
would write.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keelscope.cli.output import Row

__all__ = ["PAGES", "catalogue", "command_line"]

ROOT = Path(__file__).parent.parent
WIDTH = "100"


def command_line() -> str:
    """docs/cli.md: the help text of every command, built-in and plugin."""
    parts = [
        "# Command line",
        "`keelscope COMMAND --help` prints what follows. Results go to stdout, progress and notes to stderr.",
        "Exit codes: 0 done, 1 a finding matched `--fail-on`, 2 usage or bad input (one sentence on stderr), "
        "3 a bug in keelscope, 130 interrupted. `--debug` anywhere on the line shows the traceback behind a sentence.",
    ]
    for command in ["", *_commands()]:
        parts += [f"## keelscope {command}".rstrip(), f"```text\n{_help(command)}\n```"]
    return "\n\n".join(parts) + "\n"


def catalogue() -> str:
    """docs/catalogue.md: probes, statistics and rules as ``keelscope list`` prints them."""
    from keelscope.cli import list_command

    titles = {
        "Probes": list_command.probes,
        "Statistics": list_command.statistics,
        "Rules": list_command.rules,
        "Thresholds": list_command.thresholds,
    }
    parts = [
        "# Catalogue",
        "What `keelscope list probes`, `statistics`, `rules`, `thresholds` print; [schemes](schemes.md) have a page.",
    ]
    for title, rows in titles.items():
        parts += [f"## {title}", _table(rows())]
    return "\n\n".join(parts) + "\n"


PAGES = {"docs/cli.md": command_line, "docs/catalogue.md": catalogue}


def _commands() -> list[str]:
    from typer.main import get_command

    from keelscope.cli.application import create_app

    group = get_command(create_app())
    return list(group.list_commands(None))  # type: ignore[attr-defined]  # a group is typed as any command


def _help(command: str) -> str:
    environment = {**os.environ, "TERMINAL_WIDTH": WIDTH, "COLUMNS": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    words = [sys.executable, "-m", "keelscope", *command.split(), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip("\n")


def _table(rows: list[Row]) -> str:
    keys = list(rows[0])
    lines = [keys, ["---"] * len(keys), *([_cell(row[key], key) for key in keys] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str, key: str) -> str:
    escaped = text.replace("|", r"\|")
    return f"`{escaped}`" if key == "name" else escaped


if __name__ == "__main__":
    for page, write in PAGES.items():
        (ROOT / page).write_text(write(), encoding="utf-8")
