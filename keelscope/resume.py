"""Where a training stands when its recording begins: the number of its first step.

Steps count completed optimizer steps. A training that goes on from a checkpoint is not at step 0, and a run that is
resumed must not be told so: rows of the run from the first step on are overtaken by the new ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from torch.optim import Optimizer

from keelscope.errors import RunFileError, UsageError
from keelscope.store.filesource import FileSource
from keelscope.store.parts import find_parts
from keelscope.store.schema import SCALARS

__all__ = ["completed_steps", "last_step", "starting_step"]


def starting_step(first_step: int | None, path: str | Path | None, exists: str, optimizers: Iterable[Optimizer]) -> int:
    """The number of the first step that will be watched.

    What the caller says counts. A run that is resumed asks the optimizers, whose state comes from the checkpoint, and
    goes on after its last row where they do not know (plain SGD, or nothing loaded). Everything else begins at 0.

    Args:
        first_step: what the caller said, None if nothing.
        path: the run file.
        exists: what to do if it exists.
        optimizers: those of the training, with their state loaded.

    Returns:
        0 or more.

    Raises:
        UsageError: if `first_step` is not such a number.
    """
    if first_step is None:
        if exists != "resume" or path is None:
            return 0
        return completed_steps(optimizers) or last_step(Path(path).expanduser()) + 1
    if isinstance(first_step, bool) or not isinstance(first_step, int) or first_step < 0:
        raise UsageError(f"first_step= takes the number of completed steps, 0 or more; got {first_step!r}.")
    return first_step


def completed_steps(optimizers: Iterable[Optimizer]) -> int:
    """Steps that optimizers say they have made.

    Args:
        optimizers: any of torch; those without a ``step`` in their state (SGD) say nothing.

    Returns:
        The largest number any of them holds, 0 if there is none.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = torch.optim.Adam([weight])
        >>> for _ in range(3):
        ...     weight.square().backward()
        ...     optimizer.step()
        >>> completed_steps([optimizer])
        3
    """
    states = [state for optimizer in optimizers for state in optimizer.state.values() if isinstance(state, dict)]
    counts = [state["step"] for state in states if "step" in state]
    return max((int(count) for count in counts), default=0)


def last_step(path: Path) -> int:
    """The last step recorded in any part of a run, whoever wrote it and however it ended.

    Args:
        path: the run file.

    Returns:
        Its number, -1 if there is none.
    """
    last = -1
    for file in (path, *find_parts(path).values()):
        with suppress(RunFileError):
            source = FileSource(file)
            steps = source.steps(SCALARS)
            last = max(last, int(steps[-1]) if len(steps) else -1)
            source.close()
    return last
