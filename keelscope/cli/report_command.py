"""``keelscope report``: the gradient flow of a run file or of a model, layer by layer, with a verdict."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keelscope.cli.measuring import Measured, is_model, measure_model, open_target
from keelscope.cli.output import closed_pipe_is_fine, exit_if_damaged, note, stdout_console, to_json, write
from keelscope.errors import UnknownNameError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keelscope.diagnosis import Report

__all__ = ["Format", "add_command"]


class Format(StrEnum):
    """How a report is written."""

    TEXT = "text"
    MARKDOWN = "markdown"
    JSON = "json"
    CSV = "csv"
    HTML = "html"


SUFFIXES = {".txt": Format.TEXT, ".md": Format.MARKDOWN, ".json": Format.JSON, ".csv": Format.CSV, ".html": Format.HTML}


def add_command(app: typer.Typer) -> None:
    """Add ``report`` to the application.

    Args:
        app: the application.
    """
    app.command("report", epilog='Example: keelscope report net.py:make --input "int64[4,128]<50257"')(report_target)


def report_target(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Run file, or model: pkg.mod:factory, file.py:factory, hf:gpt2, ...")
    ],
    form: Annotated[
        Format | None, typer.Option("--format", "-f", metavar="FORMAT", help="text, markdown, json, csv or html.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; its suffix decides the format.")] = None,
    unfold: Annotated[bool, typer.Option("--all", help="Show every layer of a long stack.")] = False,
    step: Annotated[int, typer.Option(help="Recorded step to show; -1 is the last.")] = -1,
    sites: Annotated[str, typer.Option(help="Show only layers whose path matches, e.g. 'blocks.3*'.")] = "",
    fail_on: Annotated[str | None, typer.Option(help="Exit 1 on these headlines, rules or severities.")] = None,
    rules: Annotated[
        str, typer.Option(help="Rule set of the findings: default, or classic absolute limits.")
    ] = "default",
    threshold: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Change a threshold, e.g. vanishing=3; repeatable.")
    ] = None,
    thresholds: Annotated[Path | None, typer.Option(help="TOML file with a table [thresholds].")] = None,
    input: Annotated[str, typer.Option(help='Random input of a model: "int64[4,128]<50257".')] = "",  # noqa: A002 - the option's name
    batch: Annotated[str, typer.Option(help="Batch of a model: pkg.mod:fn.")] = "",
    loss: Annotated[str, typer.Option(help="auto, sum, lm, cross_entropy or pkg.mod:fn of (output, batch).")] = "",
    seed: Annotated[int, typer.Option(help="Seed of a model's weights and input.")] = 0,
) -> None:
    """Report how gradients flow through a recorded run or a model, layer by layer."""
    from keelscope.diagnosis.fail_on import fail_words, matched

    chosen = _format(form, output, json=json)
    words = () if fail_on is None else fail_words(fail_on, option="--fail-on")
    judging = _judging(rules, thresholds, threshold or [])
    measured = _measured(target, step, judging, seed=seed, input=input, batch=batch, loss=loss)
    report = measured.report
    if sites:
        report = _narrowed(report, sites)
    with closed_pipe_is_fine():
        _show(report, measured.made_of, chosen, output, unfold=unfold)
    failed = matched(report, words)
    if failed:
        note(f"--fail-on: {', '.join(failed)}.")
        raise typer.Exit(1)
    exit_if_damaged(report.run)


def _judging(rules: str, file: Path | None, settings: list[str]) -> dict[str, Any]:
    """What `diagnose` is asked for beside the step; names are checked before anything is run."""
    from keelscope.diagnosis.rules import check_set
    from keelscope.diagnosis.thresholds import parsed, read_thresholds, thresholds_with

    check_set(rules)
    changes = {**(read_thresholds(file) if file is not None else {}), **parsed(settings)}
    thresholds_with(changes)
    return {"rules": rules, "thresholds": changes}


def _measured(target: str, step: int, judging: Mapping[str, Any], *, seed: int, **of_model: str) -> Measured:
    if is_model(target):
        return measure_model(target, judging, seed=seed, **of_model)
    if any(of_model.values()):
        raise UsageError(f"--input, --batch and --loss belong to a model; {target} is a run file.")
    from keelscope.diagnosis import diagnose

    return Measured(diagnose(open_target(target), step=step, **judging))


def _narrowed(report: Report, pattern: str) -> Report:
    layers = tuple(layer for layer in report.layers if fnmatchcase(layer.path, pattern))
    if not layers:
        known = ", ".join(layer.path for layer in report.layers[:3])
        raise UnknownNameError(f"--sites {pattern!r} matches no layer; layers are {known}, ...")
    return replace(report, layers=layers)


def _format(form: Format | None, output: Path | None, *, json: bool) -> Format:
    if json and form not in {None, Format.JSON}:
        raise UsageError(f"--json and --format {form} contradict each other; give one.")
    suffix = output.suffix if output else ""
    if suffix and suffix not in SUFFIXES and not json and form is None:
        known = ", ".join(sorted(SUFFIXES))
        raise UsageError(f"--output {output}: the suffix {suffix} names no format; use {known}, or give --format.")
    chosen = Format.JSON if json else form or SUFFIXES.get(suffix, Format.TEXT)
    if chosen is Format.HTML and output is None:
        raise UsageError("--format html needs --output FILE.html.")
    return chosen


def _show(report: Report, made_of: Mapping[str, str], form: Format, output: Path | None, *, unfold: bool) -> None:
    if form is Format.HTML and output is not None:
        note(f"wrote {report.to_html(output)}.")
    elif form is Format.TEXT and output is None:
        from rich.markup import escape

        from keelscope.terminal import render

        console = stdout_console()
        for name, value in made_of.items():
            console.print(f"[dim]{name:<7}[/] {escape(value)}", soft_wrap=True)
        render(report, console, unfold=unfold)
    else:
        write(_WRITERS[form](report, made_of, unfold), output)


def _text(report: Report, made_of: Mapping[str, str], unfold: bool) -> str:
    lines = [f"{name:<7} {value}" for name, value in made_of.items()]
    return "\n".join([*lines, report.to_text(unfold=unfold)])


def _markdown(report: Report, made_of: Mapping[str, str], unfold: bool) -> str:
    lines = [f"- {name}: `{value}`" for name, value in made_of.items()]
    return "\n".join([report.to_markdown(unfold=unfold).rstrip(), *([""] if lines else []), *lines])


def _json(report: Report, made_of: Mapping[str, str], _: bool) -> str:
    return to_json({**report.to_dict(), **made_of})


def _csv(report: Report, _: Mapping[str, str], __: bool) -> str:
    return report.to_csv()


_WRITERS: Mapping[Format, Callable[[Report, Mapping[str, str], bool], str]] = {
    Format.TEXT: _text,
    Format.MARKDOWN: _markdown,
    Format.JSON: _json,
    Format.CSV: _csv,
}
