"""Dense recording where something happens: a spike or a number that is not finite arms the steps that follow.

A sparse schedule misses what it is there for. Between recorded steps no hook sits on the model, but numbers still pass
by: what the user logs, and the gradient that the optimizer is about to use. `Arming` judges them against their own past
and tells `keelscope.session` which steps to record beside the schedule, and why.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch.optim import Optimizer

from keelscope.board import Board, gather
from keelscope.entries import on_this_rank
from keelscope.errors import UsageError
from keelscope.journal import Journal
from keelscope.schedule import Schedule
from keelscope.statistics import SQUARES
from keelscope.store.armed import ARMED, ARMED_BY

__all__ = ["Arm", "Arming", "Past"]

_TO_DEVIATION = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
_SMALLEST_SPREAD = 0.01
"""Of the median: numbers that hardly vary may rise by 1 % without being 1 deviation away."""
_LARGEST = 1e9


@dataclass(frozen=True, slots=True)
class Arm:
    """When to record every step for a while, beside the schedule.

    A number is a spike where ``(x - median) / (1.4826 MAD)`` of its last `window` values reaches `z`. The first value
    that is not finite counts too. Numbers that come again while recording is armed prolong it.

    Raises:
        UsageError: if a value cannot be used.

    Example:
        >>> Arm(steps=50, on="loss").on
        ('loss',)
    """

    steps: int = 20
    """How many steps are recorded after the one where it happened."""
    z: float = 6.0
    """How many robust standard deviations above the median are a spike."""
    on: str | tuple[str, ...] = ("loss", "grad_norm")
    """Numbers that the user logs, by name; ``grad_norm_total`` of recorded steps is looked at in any case."""
    gradients: bool = True
    """Whether to look, on every step, at the norm of the gradient that the optimizer is about to use: one pass over the
    gradients, and one number read from the device."""
    before: int = 0
    """How many steps before it are kept too: every step is then recorded, and most rows are dropped again."""
    window: int = 128
    """How many values the past is made of."""
    least: int = 16
    """How many values must be known before one can be a spike."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "on", (self.on,) if isinstance(self.on, str) else tuple(self.on))
        if self.steps < 1 or self.before < 0 or not self.z > 0:
            given = f"steps={self.steps}, z={self.z}, before={self.before}"
            raise UsageError(f"Arm needs steps >= 1, z > 0 and before >= 0; got {given}.")
        if not 2 <= self.least <= self.window:
            raise UsageError(f"Arm needs 2 <= least <= window; got least={self.least}, window={self.window}.")


class Past:
    """The last values of one number, and how far the next is from them.

    Args:
        window: how many are kept.
        least: how many are needed.
    """

    def __init__(self, window: int, least: int) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._least = least
        self._was_finite = True

    def judge(self, value: float) -> float:
        """Take in the next value.

        Args:
            value: any number.

        Returns:
            Its distance above the median in robust standard deviations; infinity for the first that is not finite, 0
            for those that follow, and while too few values are known.
        """
        before, self._was_finite = self._was_finite, math.isfinite(value)
        if not self._was_finite:
            return math.inf if before else 0.0
        distance = self._distance(value) if len(self._values) >= self._least else 0.0
        self._values.append(value)
        return distance

    def _distance(self, value: float) -> float:
        values = np.array(self._values)  # [step]
        median = float(np.median(values))
        spread = _TO_DEVIATION * float(np.median(np.abs(values - median)))
        distance = (value - median) / max(spread, _SMALLEST_SPREAD * abs(median), sys.float_info.min)
        return min(distance, _LARGEST)


class Arming:
    """Which steps are recorded: those of the schedule, and those after something happened.

    Args:
        schedule: of the watch.
        arm: when to record more; None for never.
        journal: where the reasons go.
    """

    def __init__(self, schedule: Schedule, arm: Arm | None, journal: Journal) -> None:
        self._schedule, self._arm, self._journal = schedule, arm, journal
        self._first = self._last = -1
        self._broken = -math.inf
        """The last step on which something was not finite; what follows from it is no reason of its own."""
        self._squares: float | None = None
        self._past: dict[str, Past] = {}
        if arm is not None:
            own = ("grad_norm_total", "gradients") if arm.gradients else ("grad_norm_total",)
            self._past = {name: Past(arm.window, arm.least) for name in (*arm.on, *own)}
            journal.hold = arm.before
        self.weighs = "gradients" in self._past
        """Whether gradients are looked at on every step."""
        self.judges = bool(self._past)
        """Whether numbers of recorded steps are looked at when they come."""

    def records(self, step: int) -> bool:
        """Whether the step is observed, be it that its row is dropped later."""
        arm = self._arm
        return self._schedule.records(step) if arm is None else self.keeps(step) or arm.before > 0

    def keeps(self, step: int) -> bool:
        """Whether its row is stored whatever comes."""
        return self._schedule.records(step) or self._first <= step <= self._last

    def see(self, step: int, name: str, value: float) -> bool:
        """Judge a number.

        Args:
            step: where it belongs.
            name: its name.
            value: the number.

        Returns:
            Whether the steps after that one are armed by it.
        """
        past = self._past.get(name)
        distance = 0.0 if past is None else past.judge(value)
        if self._arm is None or not distance >= self._arm.z:
            return False
        if math.isinf(distance):
            if self._broken < step <= self._broken + self._arm.steps:
                return False
            self._broken = step
        self._first = self._first if step <= self._last else step + 1
        self._last = step + self._arm.steps
        self._journal.log(step, {ARMED_BY + name: distance})
        self._journal.keep(step - self._arm.before, {ARMED: 1.0})
        return True

    def see_all(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Judge the numbers that the watch itself has of a recorded step."""
        for name, value in scalars.items() if self.judges else ():
            if value is not None:
                self.see(step, name, value)

    def scalars(self, step: int) -> dict[str, float]:
        """What is stored beside the row of a recorded step: whether it is one because something happened.

        Args:
            step: its number.

        Returns:
            Name -> number; every name from the first row on, since one that comes late begins a part of the file.
        """
        if self._arm is None:
            return {}
        kept = {ARMED: float(not self._schedule.records(step))} if self.keeps(step) else {}
        return dict.fromkeys((ARMED_BY + name for name in self._past), math.nan) | kept

    def weigh(self, optimizer: Optimizer) -> None:
        """Measure the gradients that an optimizer is about to use; an overflow is the business of its loss scaler."""
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and float(overflow):
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer takes it out itself
        norm = _total_norm(optimizer) / (1.0 if scale is None else float(scale))
        self._squares = (self._squares or 0.0) + norm**2

    def step_ends(self, step: int) -> None:
        """A step is complete: judge its gradients."""
        squares, self._squares = self._squares, None
        if squares is not None:
            self.see(step, "gradients", math.sqrt(squares))


def _total_norm(optimizer: Optimizer) -> float:
    """The norm over all gradients of an optimizer that lie on this rank."""
    held = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    own = [view[0] for gradient in held if gradient is not None and (view := on_this_rank((gradient.detach(),)))]
    board = Board()
    slots = board.put_many(SQUARES, own) if own else []
    squares = gather(slots, SQUARES, board.fetch())[:, SQUARES.columns.index("squares")]  # [parameter]
    return math.sqrt(float(squares.sum()))
