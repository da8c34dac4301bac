"""``keelscope train``: train reference models on real text, record each, and compare them layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keelscope.cli.compare_command import show_comparison
from keelscope.cli.output import note
from keelscope.cli.recording import Plan, Recorded, record_all
from keelscope.errors import UsageError

__all__ = ["add_command", "say_results"]


def add_command(app: typer.Typer) -> None:
    """Add ``train`` to the application.

    Args:
        app: the application.
    """
    app.command("train", epilog="Example: keelscope train keel post_ln pre_ln --depth 64 --steps 200")(train_schemes)


def train_schemes(
    schemes: Annotated[
        list[str], typer.Argument(metavar="SCHEME...", help="Residual schemes; keel?alpha=2 sets an option.")
    ],
    depth: Annotated[int, typer.Option(help="Residual sub-layers; a block is two.")] = 64,
    width: Annotated[int, typer.Option(help="Features of the stream.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 100,
    every: Annotated[int, typer.Option(min=1, help="Record every n-th step.")] = 1,
    arm: Annotated[
        int, typer.Option(min=0, help="Steps to record after a spike or a number that is not finite; 0 for none.")
    ] = 0,
    arm_z: Annotated[float, typer.Option(help="Robust standard deviations above the median that are a spike.")] = 6.0,
    probes: Annotated[
        str, typer.Option(help="Probes to record, separated by commas; keelscope list probes shows them.")
    ] = "default,sublayers",
    batch_size: Annotated[int, typer.Option(help="Windows of text per step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 128,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 chooses by width.")] = 0,
    text: Annotated[Path | None, typer.Option(help="File or folder of text; default: Python's own source.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run files.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Train reference models on text, record each to OUT/SCHEME.h5, and compare them."""
    from keelscope.arming import Arm
    from keelscope.probe import resolve_probes
    from keelscope.text import Text
    from keelscope.training import TrainingConfig

    doubled = sorted({scheme for scheme in schemes if schemes.count(scheme) > 1})
    if doubled:
        raise UsageError(f"scheme {doubled[0]} is named twice; name each once.")
    training = TrainingConfig(steps=steps, batch_size=batch_size, length=length, learning_rate=lr, seed=seed)
    sizes = {"depth": depth, "width": width, "heads": heads, "seed": seed}
    chosen = [name.strip() for name in probes.split(",") if name.strip()]
    resolve_probes(chosen)  # a wrong name is said before any model is built
    armed = Arm(steps=arm, z=arm_z) if arm else None
    plan = Plan(schemes, sizes, Text.read(text), training, out, every, threads, chosen, armed)
    recorded = record_all(plan)
    say_results(recorded)
    show_comparison([run.path for run in recorded], json=json)
    if recorded[-1].result is None:
        raise KeyboardInterrupt


def say_results(recorded: list[Recorded]) -> None:
    """Say on stderr what became of each training and where it is.

    Args:
        recorded: what `record_all` returned.
    """
    for run in recorded:
        outcome = "interrupted" if run.result is None else run.result.message
        note(f"{run.scheme}: {outcome}; {run.path}")
