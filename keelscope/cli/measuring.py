"""From a target on the command line to a report: a run file is diagnosed, a model is measured once.

Shared by ``report`` and ``compare``. A run file is read without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keelscope.errors import RunNotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from keelscope.diagnosis import Report
    from keelscope.store.reader import Run

__all__ = ["Measured", "is_model", "measure_model", "open_target"]

MODEL_FORMS = "pkg.module:factory, path/file.py:factory, hf:NAME, timm:NAME, torchvision:NAME or scheme:NAME"


@dataclass(frozen=True, slots=True)
class Measured:
    """A report of a model, and what it is of."""

    report: Report
    made_of: Mapping[str, str] = field(default_factory=dict)
    """``target``, ``input`` and ``loss`` in words."""


def is_model(target: str) -> bool:
    """Whether a target is a model rather than a run file, by form alone: torch is not imported.

    Args:
        target: what the user typed.

    Returns:
        True for ``family:name``, ``module:name`` and ``file.py:name``.
    """
    path = Path(target)
    return (":" in target or target.endswith(".py")) and (path.suffix == ".py" or not path.exists())


def open_target(target: str) -> Run:
    """Open the run file that a target names.

    Args:
        target: a path.

    Returns:
        The run; the caller closes it.

    Raises:
        UsageError: if it is a folder.
        RunNotFoundError: if there is no such file, and it is no model either.
    """
    from keelscope.store.reader import open_run

    path = Path(target)
    if path.is_dir():
        files = sorted(path.glob("*.h5"))
        hint = f"name one of {', '.join(str(file) for file in files[:3])}" if files else "it holds no .h5 file"
        raise UsageError(f"{path} is a folder; {hint}.")
    if not path.exists() and path.suffix not in {".h5", ".hdf5"}:
        raise RunNotFoundError(f"there is no run file {path}, and it is no model either; a model is {MODEL_FORMS}.")
    return open_run(path, isolated=True)


def measure_model(target: str, judging: Mapping[str, Any] | None = None, *, seed: int, **options: str) -> Measured:
    """One forward and backward of a model.

    Args:
        target: what `keelscope.targets.resolve` takes.
        judging: what `diagnose` is asked for: `rules`, `thresholds`.
        seed: of weights, input and dropout.
        options: ``input``, ``batch`` and ``loss``.

    Returns:
        The report.
    """
    import torch

    from keelscope.diagnosis import diagnose
    from keelscope.oneshot import record_once
    from keelscope.targets import resolve

    case = resolve(target, seed=seed, **options)
    torch.manual_seed(seed)  # dropout draws the same numbers every time
    made_of = {"target": target, "input": case.input}
    config: dict[str, object] = {**made_of, **case.sizes}

    def loss(output: object, batch: object) -> Tensor:
        value = case.loss(output, batch)
        config["loss"] = case.loss.describe()  # what `auto` is shows when it is called, before the row is kept
        return value

    run = record_once(case.model, case.batch, loss, config=config)
    return Measured(diagnose(run, **(judging or {})), {**made_of, "loss": case.loss.describe()})
