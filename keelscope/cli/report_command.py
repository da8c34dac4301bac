"""``keelscope report``: the gradient flow of a run file or of a model, layer by layer, with a verdict."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from keelscope.cli.output import note, stdout_console, to_json, write
from keelscope.errors import RunNotFoundError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from keelscope.report import Report

__all__ = ["Format", "add_command"]


class Format(StrEnum):
    """How a report is written."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


SUFFIXES = {".md": Format.MARKDOWN, ".json": Format.JSON, ".csv": Format.CSV, ".html": Format.HTML}


def add_command(app: typer.Typer) -> None:
    """Add ``report`` to the application.

    Args:
        app: the application.
    """
    examples = 'Examples: keelscope report runs/keel.h5 -- keelscope report net.py:make --input "int64[4,128]<50257"'
    app.command("report", epilog=examples)(report_target)


def report_target(
    target: Annotated[
        str, typer.Argument(help="Run file, or model: pkg.mod:factory, file.py:factory, hf:, timm:, scheme:, ...")
    ],
    form: Annotated[
        Format | None, typer.Option("--format", "-f", help="Default: from --output's suffix, else text.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file.")] = None,
    unfold: Annotated[bool, typer.Option("--all", help="Show every layer of a deep stack.")] = False,
    step: Annotated[int, typer.Option(help="Recorded step to report; -1 is the last.")] = -1,
    sites: Annotated[str, typer.Option(help="Show only sites that match a glob: 'blocks.3*'.")] = "",
    fail_on: Annotated[str, typer.Option(help="Exit 1 on these verdicts, rules or severities: vanishing,error.")] = "",
    input: Annotated[str, typer.Option(help='Random input of a model: "int64[4,128]<50257".')] = "",  # noqa: A002 - the option's name
    batch: Annotated[str, typer.Option(help="Batch of a model: pkg.mod:fn.")] = "",
    loss: Annotated[str, typer.Option(help="auto, sum, lm, cross_entropy or pkg.mod:fn of (output, batch).")] = "",
    seed: Annotated[int, typer.Option(help="Seed of a model's weights and input.")] = 0,
) -> None:
    """Report how gradients flow through a recorded run or a model, layer by layer."""
    verdicts = _verdicts(fail_on)
    chosen = _format(form, output, json=json)
    from keelscope.targets.target import is_model_target
