"""The numbers that the watch itself logs beside a row: the learning rate, and the norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from keelscope.probe import Probe, group_of
from keelscope.rows import RowValues, total_norm
from keelscope.store.names import TOTAL_NORM
from keelscope.taps import Tap

__all__ = ["OwnScalars"]


class OwnScalars:
    """Of one recording.

    Args:
        optimizers: of the watch; the first one tells the rate.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._leading = next(iter(optimizers), None)
        self._rate: float | torch.Tensor = math.nan

    def note(self, optimizer: Optimizer) -> None:
        """Keep the rate of an optimizer that is about to step: schedulers change it before the row ends."""
        if optimizer is self._leading:
            rate = optimizer.param_groups[0].get("lr", math.nan)
            self._rate = rate.detach().clone() if isinstance(rate, torch.Tensor) else rate

    def of(self, row: RowValues, probes: Sequence[Probe], *, at_once: bool, has_total: bool) -> dict[str, float | None]:
        """The numbers of a row.

        Args:
            row: the values of the step.
            probes: of the watch.
            at_once: whether no number may wait until the row is written.
            has_total: whether the norms of the parameters on this rank are those of the model.

        Returns:
            Name -> number; None of one that a group of the row will tell.
        """
        found: dict[str, float | None] = {} if self._leading is None else {"lr": float(self._rate)}
        for probe in probes:
            if probe.tap is Tap.PARAMETER_GRADIENT:
                waiting = None if at_once else row.later.get(group_of(probe))
                if waiting is not None and waiting.total:
                    return found | {TOTAL_NORM: None}
                norm = total_norm(row, probe)
                if norm is not None:
                    return found | {TOTAL_NORM: norm} if has_total else found
        return found
