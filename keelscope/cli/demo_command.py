"""``keelscope demo``: three schemes at depth 64 on real text, recorded and compared in a minute or two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from keelscope.cli.compare_command import show_comparison
from keelscope.cli.output import invocation
from keelscope.cli.recording import Plan, new_folder, record_all
from keelscope.cli.train_command import say_results

__all__ = ["SCHEMES", "add_command"]

SCHEMES = ("keel", "post_ln", "pre_ln")
SIZES = {"depth": 64, "width": 64, "heads": 4, "seed": 0}


def add_command(app: typer.Typer) -> None:
    """Add ``demo`` to the application.

    Args:
        app: the application.
    """
    app.command("demo", epilog="Example: keelscope demo --steps 100")(demonstrate)


def demonstrate(
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps per scheme.")] = 40,
    out: Annotated[Path, typer.Option(help="Folder in which demo-N is made.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Train keel, post_ln and pre_ln, 64 sub-layers each, on Python's own source, and compare their gradients."""
    from keelscope.text import Text
    from keelscope.training import TrainingConfig

    training = TrainingConfig(steps=steps, batch_size=4, length=64)
    plan = Plan(SCHEMES, SIZES, Text.read(), training, new_folder(out, "demo"))
    recorded = record_all(plan)
    say_results(recorded)
    show_comparison([run.path for run in recorded], json=json)
    if recorded[-1].result is None:
        raise KeyboardInterrupt
    if not json:
        program = invocation(sys.argv[0])
        print(f"\nOpen the dashboard:     {program} dash {plan.folder}")
        print(f"One run layer by layer: {program} report {recorded[0].path}")
