"""Lightning: ``Trainer(callbacks=[KeelscopeCallback("runs/net.h5", every=10)])``, of either of its two packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Self

from keelscope.integrations.recording import RecordingCallback, class_of, takes_part, with_bases

__all__ = ["KeelscopeCallback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class KeelscopeCallback(RecordingCallback):
    """A Lightning ``Callback`` that records ``fit``, one row per optimizer step.

    With several optimizers (manual optimization) a row ends when each has stepped. Sanity check and validation stay
    out. The loss is that of ``training_step``, the mean over the batches of a step. A training resumed with
    ``ckpt_path=`` goes on with its step number, in a file of its own or with ``exists="resume"`` in the same.

    Args and options are those of `keelscope.integrations.recording.RecordingCallback`.
    """

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Make it a ``Callback`` of the package whose Trainer will use it; of both where both are imported.

        Raises:
            UsageError: if Lightning is not installed.
        """
        bases = tuple(class_of(package, "Callback", "lightning") for package in _imported_packages())
        made: Self = object.__new__(cls if issubclass(cls, bases) else with_bases((cls, *bases)))
        return made

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to record: the sanity check is over, a checkpoint is loaded."""
        if not takes_part(is_main=trainer.is_global_zero):
            return
        settings = {
            "precision": trainer.precision,
            "gradient_clip_val": trainer.gradient_clip_val,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
        }
        self._losses: list[Any] = []
        self._steps = trainer.global_step
        steps = trainer.global_step // max(len(trainer.optimizers), 1)  # Lightning counts the steps of each
        self.start(pl_module, trainer.optimizers, first_step=steps, config=settings)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_args: Any) -> None:
        """Store the loss with the step that its batch completed."""
        if self.watch is None or not takes_part(is_main=trainer.is_global_zero):
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if loss is not None:
            self._losses.append(loss)
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            if self._losses:
                # of automatic optimization, each is divided by the number of batches already
                count = 1 if pl_module.automatic_optimization else len(self._losses)
                self.watch.log(loss=sum(self._losses) / count)
            self._losses = []

    def on_train_end(self, *_args: Any) -> None:
        """Close the run file."""
        self.close()

    def on_exception(self, _trainer: Any, _pl_module: Any, exception: BaseException) -> None:
        """Close the run file; the step that failed is left out."""
        self.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self, *_args: Any, **_: Any) -> None:
        """Close the run file, whatever happened."""
        self.close()


def _imported_packages() -> tuple[str, ...]:
    imported = tuple(package for package in _PACKAGES if sys.modules.get(package))
    old = find_spec("lightning") is None and find_spec("pytorch_lightning") is not None
    return imported or (_PACKAGES[1:] if old else _PACKAGES[:1])
