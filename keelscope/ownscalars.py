"""What the watch itself logs beside a row: learning rate, norm of all gradients, attempts that a loss scaler skipped.

`keelscope.recorder` tells it of optimizers and of steps that begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.optim import Optimizer

from keelscope.distributed import Ranks
from keelscope.lossscale import LossScale, any_scaler
from keelscope.probe import Probe, Tap, group_of
from keelscope.rows import RowValues, total_norm

__all__ = ["OwnScalars"]


class OwnScalars:
    """Numbers of the open step, and then of the last one.

    Args:
        optimizers: of the watch; the first one has the learning rate.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.scale = LossScale()
        self._leading, self._rate = next(iter(optimizers), None), torch.tensor(math.nan)
        self._attempts, self._unused = 0, False

    def before_step(self, optimizer: Optimizer, *, changed: Callable[[], bool]) -> None:
        """Keep the rate and the scale of the step that an optimizer is about to make.

        Args:
            optimizer: the optimizer.
            changed: see `keelscope.lossscale.LossScale.note`.
        """
        if optimizer is self._leading:  # now: schedulers change it before the row ends
            self._rate = torch.as_tensor(optimizer.param_groups[0].get("lr", math.nan), dtype=torch.float64).clone()
        self.scale.note(optimizer, changed=changed)

    def begins_anew(self) -> None:
        """The gradients of an attempt were cleared unused."""
        self._attempts += 1

    def close(self, *, used: bool) -> float:
        """The step is over.

        Args:
            used: whether an optimizer used a gradient.

        Returns:
            What its gradients are multiplied by.
        """
        self._unused = not used
        return 1.0 / self.scale.take()

    def of(self, row: RowValues, probes: Sequence[Probe], ranks: Ranks) -> dict[str, float]:
        """What is logged beside a row.

        Args:
            row: the values of the step.
            probes: of the watch.
            ranks: what this process holds of the model.

        Returns:
            Name -> number.
        """
        found = {} if self._leading is None else {"lr": float(self._rate)}
        found |= {} if self.scale.skipped is None else {"skipped": self.scale.skipped}
        groups = {group_of(probe) for probe in probes if probe.tap is Tap.PARAMETER_GRADIENT}
        gradients = [group for group in groups if "norm" in row.values.get(group, {})]
        if gradients and ranks.reduce in {"", "replica"}:
            found["grad_norm_total"] = total_norm(row, gradients[0])
        attempts, self._attempts = float(self._attempts), 0
        if self.scale.is_known or (attempts and any_scaler()):  # from row 0 on: late names cost a part each
            found |= {"skipped_attempts": attempts, "skipped": max(found.get("skipped", 0.0), float(self._unused))}
        return found
