"""``keelscope compare``: two to eight runs or models side by side, layer by layer; ``--like`` sizes schemes alike."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keelscope.cli.measuring import is_model, measure_model, open_target
from keelscope.cli.output import exit_if_damaged, note, print_json, stdout_console
from keelscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from keelscope.diagnosis import Report

__all__ = ["MOST", "add_command", "show_comparison"]

MOST = 8
"""Runs that fit side by side."""
SCHEME = "scheme:"


def add_command(app: typer.Typer) -> None:
    """Add ``compare`` to the application.

    Args:
        app: the application.
    """
    epilog = "Example: keelscope compare scheme:keel scheme:post_ln --like runs/mine.h5"
    app.command("compare", epilog=epilog)(compare_targets)


def compare_targets(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET TARGET...", help="Run files or models, 2 to 8; 1 is enough with --like."),
    ],
    like: Annotated[
        str, typer.Option(metavar="TARGET", help="Measure scheme: targets at the size of this run or model, beside it.")
    ] = "",
    input: Annotated[str, typer.Option(help='Random input of the models: "int64[4,128]<50257".')] = "",  # noqa: A002 - the option's name
    batch: Annotated[str, typer.Option(help="Batch of the models: pkg.mod:fn.")] = "",
    loss: Annotated[str, typer.Option(help="Loss of the models: auto, sum, lm, cross_entropy or pkg.mod:fn.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of the weights and inputs of models.")] = 0,
    fail_on: Annotated[str | None, typer.Option(help="Exit 1 if one has these headlines, rules or severities.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare the gradient flow of 2 to 8 runs or models, layer by layer at equal relative depth."""
    from keelscope.diagnosis.fail_on import fail_words, matched

    named = [like, *(target for target in targets if target != like)] if like else targets
    if not 2 <= len(named) <= MOST:
        raise UsageError(f"compare takes 2 to {MOST} runs or models, not {len(named)}; use keelscope report for one.")
    if like and not any(target.startswith(SCHEME) for target in targets):
        raise UsageError("--like gives its size to reference models, and none is named; add one, such as scheme:keel.")
    words = () if fail_on is None else fail_words(fail_on, option="--fail-on")
    how: dict[str, Any] = {"seed": seed, "input": input, "batch": batch, "loss": loss}
    with ExitStack() as stack:
        reports = _like(like, targets, stack, how) if like else [_report(target, stack, how) for target in targets]
        titles = _titles(named)
        _show(reports, titles, json=json)
    failed = [
        f"{title} ({', '.join(hit)})" for t, title in zip(reports, titles, strict=True) if (hit := matched(t, words))
    ]
    if failed:
        note(f"--fail-on: {', '.join(failed)}.")
        raise typer.Exit(1)
    exit_if_damaged(*(report.run for report in reports))


def _titles(targets: Sequence[str]) -> list[str]:
    """Short names; a run and a scheme of one name are told apart."""
    short = [_title(target) for target in targets]
    whole = [target if is_model(target) else Path(target).name for target in targets]
    return [w if short.count(s) > 1 else s for s, w in zip(short, whole, strict=True)]


def _report(target: str, stack: ExitStack, how: Mapping[str, Any], *, first: bool = False) -> Report:
    """A run at its last recorded step, or at its first one; a model at its initial weights."""
    from keelscope.diagnosis import diagnose

    if is_model(target):
        return measure_model(target, **how).report
    run = stack.enter_context(open_target(target))
    return diagnose(run, step=int(run.steps[0]) if first and len(run.steps) else -1)


def _like(like: str, targets: Sequence[str], stack: ExitStack, how: Mapping[str, Any]) -> list[Report]:
    """The reference first, as it was before training, then the targets, schemes at its size."""
    from keelscope.diagnosis.sizes import sizes_of_run

    reference = _report(like, stack, how, first=True)
    sizes = sizes_of_run(reference.run)
    told = ", ".join(f"{name} {value}" for name, value in sizes.options.items())
    note(" ".join([f"schemes are measured like {like} at {told}.", *sizes.notes]))
    rest = [_sized(target, sizes.options) for target in targets if target != like]
    return [reference, *(_report(target, stack, how) for target in rest)]


def _sized(target: str, options: dict[str, int]) -> str:
    """A scheme with these sizes, unless it says its own; any other target as it is."""
    if not target.startswith(SCHEME):
        return target
    own = {pair.partition("=")[0] for pair in target.partition("?")[2].split("&")}
    added = [f"{name}={value}" for name, value in options.items() if name not in own]
    return f"{target}{'&' if '?' in target else '?'}{'&'.join(added)}" if added else target


def _title(target: str) -> str:
    return target.removeprefix(SCHEME) if is_model(target) else Path(target).stem


def show_comparison(paths: Sequence[Path], *, json: bool = False) -> None:
    """Diagnose runs and print them side by side; a single one is printed as a report.

    Args:
        paths: run files.
        json: print JSON instead of tables.
    """
    with ExitStack() as stack:
        reports = [_report(str(path), stack, {}) for path in paths]
        _show(reports, [report.title for report in reports], json=json)


def _show(reports: Sequence[Report], titles: Sequence[str], *, json: bool) -> None:
    from keelscope.diagnosis import compare
    from keelscope.terminal import render

    shown = compare(*reports, titles=titles) if len(reports) > 1 else reports[0]
    if json:
        print_json(shown.to_dict())
    else:
        render(shown, stdout_console())
