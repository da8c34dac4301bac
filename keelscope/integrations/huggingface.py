"""transformers: ``Trainer(..., callbacks=[KeelscopeCallback("runs/bert.h5", every=10)])``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from keelscope.integrations.recording import RecordingCallback, class_of, takes_part, with_bases

__all__ = ["KeelscopeCallback"]

_SETTINGS = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "bf16", "fp16", "seed")
_SCALARS = {"loss": "loss", "learning_rate": "lr", "eval_loss": "eval_loss"}
"""What the Trainer calls it -> what the run does."""


class KeelscopeCallback(RecordingCallback):
    """A `transformers.TrainerCallback` that records the training of a ``Trainer``, one row per optimizer step.

    The loss is what the Trainer logs: the mean over its ``logging_steps``, stored with the last of them. A resumed
    training goes on with the step number of its checkpoint, in a file of its own, or in the same with
    ``exists="resume"``. An exception that leaves ``train()`` is not told to callbacks: what is recorded is in the file
    within a second, and ``with KeelscopeCallback(...) as callback:`` around ``train()`` closes it at once.

    Args and options are those of `keelscope.integrations.recording.RecordingCallback`.
    """

    def __new__(cls, *_args: object, **_options: object) -> Self:
        """Make it a `transformers.TrainerCallback` too.

        Raises:
            UsageError: if transformers is not installed.
        """
        base = class_of("transformers.trainer_callback", "TrainerCallback", "huggingface")
        made: Self = object.__new__(cls if issubclass(cls, base) else with_bases((cls, base)))
        return made

    def on_train_begin(self, args: Any, state: Any, _control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        """Start to record: model and optimizer are prepared, a checkpoint is loaded."""
        if not takes_part(is_main=state.is_world_process_zero):
            return
        settings = {name: getattr(args, name) for name in _SETTINGS}
        watch = self.start(model, optimizer, first_step=state.global_step, config=settings)
        if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no":
            watch.log(eval_loss=math.nan)  # a name that comes late costs a part of the file

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        """Store loss and learning rate with the step that was just made."""
        if self.watch is not None and takes_part(is_main=state.is_world_process_zero):
            self.watch.log(**{ours: logs[theirs] for theirs, ours in _SCALARS.items() if logs and theirs in logs})

    def on_train_end(self, *_args: Any, **_: Any) -> None:
        """Close the run file."""
        self.close()
