"""``keelscope report``: the gradient flow of a run file or of a model, layer by layer, with a verdict."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keelscope.cli.output import note, stdout_console, to_json, write
from keelscope.errors import RunNotFoundError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keelscope.diagnosis import Report

__all__ = ["Format", "add_command"]

MODEL_FORMS = "pkg.module:factory, path/file.py:factory, hf:NAME, timm:NAME, torchvision:NAME or scheme:NAME"


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
    fail_on: Annotated[str, typer.Option(help="Exit 1 on these headlines, rules or severities.")] = "",
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
    chosen = _format(form, output, json=json)
    words = _verdicts(fail_on)
    judging = _judging(rules, thresholds, threshold or [])
    if _is_model(target):
        report, made_of = _report_of_model(target, judging, input=input, batch=batch, loss=loss, seed=seed)
    else:
        if input or batch or loss:
            raise UsageError(f"--input, --batch and --loss belong to a model; {target} is a run file.")
        report, made_of = _report_of_run(Path(target), step, judging), {}
    if sites:
        report = _narrowed(report, sites)
    _show(report, made_of, chosen, output, unfold=unfold)
    matched = _matched(report, words)
    if matched:
        note(f"--fail-on: {', '.join(matched)}.")
        raise typer.Exit(1)


def _judging(rules: str, file: Path | None, settings: list[str]) -> dict[str, Any]:
    """What `diagnose` is asked for beside the step; names are checked before anything is run."""
    from keelscope.diagnosis.rules import rules_of
    from keelscope.diagnosis.thresholds import parsed, read_thresholds, thresholds_with

    rules_of(rules)
    changes = {**(read_thresholds(file) if file is not None else {}), **parsed(settings)}
    thresholds_with(changes)
    return {"rules": rules, "thresholds": changes}


def _is_model(target: str) -> bool:
    """By form alone, so that a run file is reported without importing torch."""
    path = Path(target)
    return (":" in target or target.endswith(".py")) and (path.suffix == ".py" or not path.exists())


def _report_of_run(path: Path, step: int, judging: Mapping[str, Any]) -> Report:
    from keelscope.diagnosis import diagnose
    from keelscope.store.reader import open_run

    if path.is_dir():
        files = sorted(path.glob("*.h5"))
        hint = f"name one of {', '.join(str(file) for file in files[:3])}" if files else "it holds no .h5 file"
        raise UsageError(f"{path} is a folder; {hint}.")
    if not path.exists() and path.suffix not in {".h5", ".hdf5"}:
        raise RunNotFoundError(f"there is no run file {path}, and it is no model either; a model is {MODEL_FORMS}.")
    return diagnose(open_run(path), step=step, **judging)


def _report_of_model(
    target: str, judging: Mapping[str, Any], *, seed: int, **options: str
) -> tuple[Report, Mapping[str, str]]:
    import torch

    from keelscope.diagnosis import diagnose
    from keelscope.oneshot import record_once
    from keelscope.targets import resolve

    case = resolve(target, seed=seed, **options)
    torch.manual_seed(seed)  # dropout draws the same numbers every time
    run = record_once(case.model, case.batch, case.loss)
    return diagnose(run, **judging), {"target": target, "input": case.input, "loss": case.loss.describe()}


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


def _verdicts(fail_on: str) -> list[str]:
    words = [word.strip() for word in fail_on.split(",") if word.strip()]
    if words:
        known = _known_verdicts()
        for word in words:
            if word not in known:
                near = get_close_matches(word, known, n=3) or known
                raise UnknownNameError(f"--fail-on {word!r} is no headline, rule or severity; use {', '.join(near)}.")
    return words


def _known_verdicts() -> list[str]:
    from keelscope.diagnosis.finding import Severity
    from keelscope.diagnosis.headline import WORDS
    from keelscope.diagnosis.rules import SETS, rule_name, rules_of

    rules = [rule_name(rule) for name in SETS for rule in rules_of(name)]
    return list(dict.fromkeys([*WORDS, *(severity.label for severity in Severity), *rules]))


def _matched(report: Report, words: list[str]) -> list[str]:
    """The words that hold of the report; a severity also holds of every graver finding."""
    from keelscope.diagnosis.finding import Severity

    found = {report.headline, *(finding.rule for finding in report.findings)}
    gravest = max((finding.severity for finding in report.findings), default=None)
    if gravest is not None:
        found |= {severity.label for severity in Severity if severity <= gravest}
    return [word for word in words if word in found]
