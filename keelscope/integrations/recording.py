"""What the callbacks of all trainers share: the options of a watch, and the watch of the training that runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from keelscope.arming import Arm
from keelscope.distributed import place
from keelscope.errors import UsageError
from keelscope.probe import Probe
from keelscope.schedule import Schedule
from keelscope.session import Watch, watch
from keelscope.sites import Selector
from keelscope.store.pace import Pace

__all__ = ["RecordingCallback", "class_of", "takes_part", "with_bases"]


class RecordingCallback:
    """Records every training it is told of; options as in `keelscope.watch`.

    Args:
        path: the HDF5 run file to write; None keeps the run in memory.
        probes: names and probe objects.
        sites: which modules.
        every: record every n-th optimizer step, or a `Schedule`.
        arm: record every step for a while after a spike, see `keelscope.Arm`.
        config: JSON values to store with the run, beside those of the trainer.
        exists: if the file exists, ``"new"`` takes the next free name, ``"error"`` refuses, ``"resume"`` goes on.
        pace: when rows are written and when the disk must have them.
    """

    watch: Watch | None = None
    """The watch of the last training; None before the first, and on a process that does not take part."""

    def __init__(  # noqa: PLR0913 - the options of a watch
        self,
        path: str | Path | None = None,
        *,
        probes: str | Probe | Iterable[str | Probe] = "default",
        sites: Selector | Iterable[Selector] = "auto",
        every: int | Schedule = 1,
        arm: Arm | None = None,
        config: Mapping[str, object] | None = None,
        exists: str = "new",
        pace: Pace | None = None,
    ) -> None:
        super().__init__()
        self._path, self._probes, self._sites, self._every, self._arm = path, probes, sites, every, arm
        self._config, self._exists, self._pace = config or {}, exists, pace

    def start(self, model: nn.Module, optimizer: object, *, first_step: int, config: Mapping[str, object]) -> Watch:
        """Watch a training that is about to begin; an earlier one is closed.

        Args:
            model: the model that is trained.
            optimizer: its optimizers, wrapped or not.
            first_step: number of optimizer steps made before.
            config: what the trainer was set to, stored with the run.

        Returns:
            The watch.
        """
        self.close()
        self.watch = watch(
            model,
            self._path,
            optimizer=optimizer,  # type: ignore[arg-type]
            probes=self._probes,
            sites=self._sites,
            every=self._every,
            arm=self._arm,
            config={**config, **self._config},
            exists=self._exists,
            first_step=first_step,
            pace=self._pace,
        )
        return self.watch

    def close(self) -> None:
        """Close the run file, if one is open; the trainer does so at the end of training."""
        if self.watch is not None:
            self.watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.watch is not None:
            self.watch.__exit__(kind, error, trace)


def takes_part(*, is_main: bool) -> bool:
    """Whether this process records: each of a process group of torch, else the main one only.

    Args:
        is_main: whether the trainer calls it the main process.

    Returns:
        The answer.
    """
    return is_main or place()[1] > 1


@cache
def with_bases(bases: tuple[type, ...]) -> type:
    """A callback that is also one of the library's own, which its trainer insists on.

    Args:
        bases: our class, then theirs.

    Returns:
        The class, the same one each time.
    """
    ours = bases[0]
    return type(ours.__name__, bases, {"__module__": ours.__module__, "__doc__": ours.__doc__})


def class_of(module: str, name: str, extra: str) -> type:
    """A class of an optional library, or a sentence on how to get it.

    Args:
        module: module of the library.
        name: of the class.
        extra: the extra of keelscope that installs the library.

    Returns:
        The class.

    Raises:
        UsageError: if the library is not installed, or does not import.
    """
    package = module.partition(".")[0]
    try:
        found: type = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if not module.startswith(str(error.name)):
            raise UsageError(f"{package} does not import here: {error}.") from error
        raise UsageError(f"{package} is not installed; pip install 'keelscope[{extra}]'.") from error
    return found
