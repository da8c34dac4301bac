"""Train reference models and record each: shared by ``train`` and ``demo``.

One file per scheme, ``DIR/scheme.h5``; an interruption keeps what was recorded.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from keelscope.cli.output import note, stderr_console
from keelscope.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from keelscope.arming import Arm
    from keelscope.text import Text
    from keelscope.training import TrainingConfig, TrainingResult

__all__ = ["Plan", "Recorded", "file_name", "new_folder", "record", "record_all"]

NARROW = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained: each scheme on the same text, with the same sizes and batches."""

    schemes: Sequence[str]
    """Names, each with its own options if any: ``keel?alpha=2``."""
    sizes: Mapping[str, object]
    """Options of every model: depth, width, seed, ..."""
    text: Text
    training: TrainingConfig
    folder: Path
    every: int = 1
    """Record every n-th step."""
    threads: int = 0
    """CPU threads; 0 is one for a narrow model, whose operations are too small to share, else torch's choice."""
    probes: Sequence[str] = ("default", "sublayers")
    """What is recorded."""
    arm: Arm | None = None
    """When every step is recorded for a while."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One finished recording."""

    scheme: str
    path: Path
    result: TrainingResult | None
    """None when it was interrupted."""


def file_name(scheme: str) -> str:
    """The name of a scheme's run file.

    Args:
        scheme: name with its options.

    Returns:
        A name that is safe on every file system.

    Example:
        >>> file_name("keel"), file_name("keel?alpha=2&first_block=v1")
        ('keel.h5', 'keel-alpha-2-first_block-v1.h5')
    """
    safe = "".join(char if char.isalnum() or char in "._" else "-" for char in scheme)
    return f"{safe}.h5"


def record_all(plan: Plan) -> list[Recorded]:
    """Train and record every scheme of a plan, with a progress bar.

    All models are built before the first is trained, so that a wrong name or option costs no time.

    Args:
        plan: what to train.

    Returns:
        One entry per scheme that recorded anything; the last may be interrupted.
    """
    models = [_build(scheme, plan) for scheme in plan.schemes]
    _set_threads(plan)
    done: list[Recorded] = []
    with _progress(plan) as advance:
        for scheme, model in zip(plan.schemes, models, strict=True):
            done.append(record(scheme, model, plan, advance))
            if done[-1].result is None:
                break
    return done


def record(scheme: str, model: nn.Module, plan: Plan, advance: Callable[[str, float], object]) -> Recorded:
    """Train one model and record it.

    Args:
        scheme: its name, for the file.
        model: the model.
        plan: text, steps and folder.
        advance: called with scheme and loss after each step.

    Returns:
        Where it was recorded and what came of the training.
    """
    from keelscope.session import watch as open_watch
    from keelscope.training import Trainer

    trainer = Trainer(model, plan.text, plan.training)
    config = {"scheme": scheme, "text": Path(plan.text.title).name, **plan.sizes, **_settings(plan.training)}
    path = plan.folder / file_name(scheme)
    options = {"probes": plan.probes, "every": plan.every, "arm": plan.arm}
    watch = open_watch(model, path, optimizer=trainer.optimizer, config=config, **options)  # type: ignore[arg-type]
    result: TrainingResult | None = None
    try:
        with watch:
            result = trainer.run(watch=watch, on_step=lambda _, loss: advance(scheme, loss))
    except KeyboardInterrupt:
        note(f"{scheme} interrupted; what was recorded is kept.")
    return Recorded(scheme, Path(watch.path or path), result)


def _build(scheme: str, plan: Plan) -> nn.Module:
    from keelscope.targets.families import build

    options = "&".join(f"{key}={value}" for key, value in plan.sizes.items())
    joint = "&" if "?" in scheme else "?"
    return build(f"scheme:{scheme}{joint}{options}")[0]


def _set_threads(plan: Plan) -> None:
    """On busy cores, threads that wait for each other cost ten times what they save on a narrow model."""
    import torch

    width = plan.sizes["width"]
    narrow = isinstance(width, int) and width < NARROW
    if plan.threads or narrow:
        torch.set_num_threads(plan.threads or 1)


def _settings(training: TrainingConfig) -> dict[str, object]:
    from dataclasses import asdict

    return asdict(training)


@contextmanager
def _progress(plan: Plan) -> Iterator[Callable[[str, float], object]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr_console()
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {
            scheme: progress.add_task(scheme, total=plan.training.steps, loss=float("nan"), start=False)
            for scheme in plan.schemes
        }

        def advance(scheme: str, loss: float) -> None:
            progress.start_task(tasks[scheme])
            progress.update(tasks[scheme], advance=1, loss=loss)

        yield advance


def new_folder(parent: Path, name: str) -> Path:
    """The first free ``parent/name-N``, created.

    Args:
        parent: where.
        name: stem of the name.

    Returns:
        The folder.

    Raises:
        UsageError: if it cannot be created.
    """
    for number in range(1, 100_000):
        folder = parent / f"{name}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"{folder} cannot be created: {error.strerror}.") from error
        return folder
    raise UsageError(f"{parent} holds too many {name} folders; remove some.")
