"""The loss scale of mixed precision, so that gradients are recorded in units of the loss.

`torch.amp.GradScaler` leaves no trace on the optimizer it serves. Its `step` calls the optimizer, so it is found among
the callers; where the user unscales and steps by hand, the scaler that knows the optimizer is looked up once among the
live objects.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING

from torch import Tensor

from keelscope.instances import living

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

__all__ = ["LossScale", "any_scaler"]

_CALLERS = 24  # hooks, profiler, schedulers and wrappers lie between the scaler and the optimizer's hook


class LossScale:
    """The scale in force during one step; 1 where no scaler is in use."""

    def __init__(self) -> None:
        self._scaler: weakref.ref[GradScaler] | None = None
        self._searched = False
        self._current: Tensor | None = None
        self.in_step = False
        """Whether the optimizer takes the scale out itself, as fused ones do."""
        self.attempts = 0
        """Passes since the last row whose gradients nobody used."""
        self.logged: dict[str, float] = {}
        """Of the last step, where a scaler is at work: whether it was skipped, and attempts skipped before it."""
        self._overflow: Tensor | None = None

    def note(self, optimizer: Optimizer, *, changed: Callable[[], bool]) -> None:
        """Keep the scale of the step the optimizer is about to make, without waiting for the device.

        Args:
            optimizer: the optimizer about to step.
            changed: whether gradients were rewritten since backward, as unscaling and clipping do.
        """
        calling = _calling_scaler()
        if calling is not None and calling.is_enabled():
            self._scaler = weakref.ref(calling)
        elif calling is None and not self._searched and changed():
            self._searched = True
            self._scaler = _scaler_of(optimizer)
        scaler = self._scaler() if self._scaler else None
        fused = getattr(optimizer, "grad_scale", None)
        self.in_step = isinstance(fused, Tensor)
        scale = fused if isinstance(fused, Tensor) else getattr(scaler, "_scale", None)
        if scale is not None and self._current is None:
            self._current = scale.detach().clone()
        overflow = getattr(optimizer, "found_inf", None)  # of a fused optimizer, which is called all the same
        if isinstance(overflow, Tensor):
            self._overflow = overflow.detach().clone()

    def take(self, *, stepped: bool = True) -> float:
        """The scale of the closing step, and start the next one.

        Args:
            stepped: whether an optimizer used the gradients; a scaler does not call it where they overflow.

        Returns:
            The scale.
        """
        scale, self._current = self._current, None
        overflow, self._overflow = self._overflow, None
        attempts, self.attempts = self.attempts, 0
        self.logged = {}
        if overflow is not None or self._scaler is not None or (attempts and any_scaler()):
            skipped = not stepped if overflow is None else bool(overflow > 0)
            self.logged = {"skipped": float(skipped), "skipped_attempts": float(attempts)}
        return 1.0 if scale is None else float(scale)


def _calling_scaler() -> GradScaler | None:
    """The scaler whose `step` is calling the optimizer."""
    codes = _codes()
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if id(frame.f_code) in codes:
            return frame.f_locals.get("self")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


@cache
def _codes() -> frozenset[int]:
    """Identities of the code of a scaler's methods, which live as long as their module."""
    from torch.amp.grad_scaler import GradScaler

    return frozenset(id(found.__code__) for found in vars(GradScaler).values() if isinstance(found, FunctionType))


def any_scaler() -> bool:
    """Whether a scaler is at work, which skips the step of an attempt that overflows."""
    from torch.amp.grad_scaler import GradScaler

    return any(scaler.is_enabled() for scaler in living(GradScaler))


def _scaler_of(optimizer: Optimizer) -> weakref.ref[GradScaler] | None:
    """The live scaler that has unscaled this optimizer's gradients."""
    from torch.amp.grad_scaler import GradScaler

    found = (scaler for scaler in living(GradScaler) if id(optimizer) in scaler._per_optimizer_states)
    return next(map(weakref.ref, found), None)
