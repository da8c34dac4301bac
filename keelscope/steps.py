"""When an optimizer step is complete: counted from the optimizers' own hooks, or from ``watch.step()``.

With several optimizers (a GAN, one optimizer per parameter) a step is complete when each has stepped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from keelscope.errors import RecordingWarning, UsageError
from keelscope.lossscale import any_scaler

__all__ = ["IdleOptimizer", "ScalarPlaces", "StepClock", "as_optimizers"]


def as_optimizers(optimizer: object) -> tuple[Optimizer, ...]:
    """One optimizer, several or none, as a tuple; wrappers with an ``.optimizer`` inside are looked through.

    Args:
        optimizer: what the user passed as ``optimizer=``.

    Returns:
        The torch optimizers.

    Raises:
        UsageError: if something in it is no optimizer.
    """
    if optimizer is None:
        return ()
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer):
        return tuple(_as_optimizer(one) for one in optimizer)
    return (_as_optimizer(optimizer),)


def _as_optimizer(candidate: object) -> Optimizer:
    inner = candidate
    while not _steps_itself(inner) and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if isinstance(inner, type) or not hasattr(inner, "register_step_pre_hook"):
        what = f"the class {inner.__name__}" if isinstance(inner, type) else type(candidate).__name__
        raise UsageError(f"optimizer= takes torch optimizers; got {what}.")
    return inner  # type: ignore[return-value]


def _steps_itself(candidate: object) -> bool:
    """Whether its own hooks run: wrappers of Accelerate and Lightning are of class Optimizer, and have none."""
    return "_optimizer_step_pre_hooks" in getattr(candidate, "__dict__", {})


class StepClock:
    """Counts completed steps, and tells when each optimizer is about to step and has stepped.

    Args:
        optimizers: those that make a step together.
        before: called with an optimizer about to step, and whether forward and backward are still to come (a closure).
        after: called with an optimizer that has stepped, and whether that completes the step.
        first: number of steps completed before the watch.
    """

    def __init__(
        self,
        optimizers: tuple[Optimizer, ...],
        before: Callable[[Optimizer, bool], None],
        after: Callable[[Optimizer, bool], None],
        first: int = 0,
    ) -> None:
        self._first = self.completed = first
        self._waiting_for = {id(optimizer) for optimizer in optimizers}
        self._stepped: set[int] = set()
        self._after = after
        self._handles = []
        for optimizer in optimizers:
            self._handles.append(
                optimizer.register_step_pre_hook(lambda opt, args, kwargs: before(opt, _has_closure(args, kwargs)))
            )
            self._handles.append(optimizer.register_step_post_hook(lambda opt, *_: self._note(opt)))

    @property
    def partial(self) -> bool:
        """Whether some but not all optimizers have stepped."""
        return bool(self._stepped)

    @property
    def untouched(self) -> bool:
        """Whether no step is complete since the watch began."""
        return self.completed == self._first

    def tick(self) -> None:
        """Count one step."""
        self.completed += 1
        self._stepped.clear()

    def close(self) -> None:
        """Give the optimizers' hooks back."""
        for handle in self._handles:
            handle.remove()

    def _note(self, optimizer: Optimizer) -> None:
        self._stepped.add(id(optimizer))
        done = self._stepped >= self._waiting_for
        if done:
            self.tick()
        self._after(optimizer, done)


def _has_closure(args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether ``optimizer.step(closure)`` will run forward and backward itself (LBFGS, Lightning)."""
    if not kwargs and len(args) < 2:
        return False
    return callable(kwargs.get("closure")) or any(callable(argument) for argument in args[1:])


class ScalarPlaces:
    """The step that a logged number belongs to: the last completed one, or the running one.

    On recorded steps that is seen. On the others it is as it was for the same name when it last was seen.

    Args:
        first: number of steps completed before the watch.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._early: set[str] = set()

    def of(self, name: str, completed: int, begun: bool | None) -> int:
        """The step of a number logged now.

        Args:
            name: its name.
            completed: number of completed steps.
            begun: whether the running step has had a forward; None where that is not seen.

        Returns:
            Step number from 0.
        """
        if begun is not None:
            (self._early.add if begun else self._early.discard)(name)
        return completed if completed == self._first or name in self._early else completed - 1


class IdleOptimizer:
    """Notices, and says once, that the watched optimizer is not the one that trains the model.

    Args:
        optimizers: those of the watch.
        model: the watched model.
    """

    STRANGE = (
        "None of the parameters of optimizer= is one of this model's: is it the one that trains this model? One made "
        "before fully_shard() holds parameters that the model no longer has."
    )

    WARNING = (
        "Gradients were cleared several times without a step of the optimizer that watch() was given; is it the one "
        "that trains this model? Until it steps, no row is complete."
    )
    _PATIENCE = 4

    def __init__(self, optimizers: Sequence[Optimizer], model: nn.Module) -> None:
        self._passes = 0
        self._counted = False
        self._in_closure = False
        trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        self._is_strange = bool(optimizers and trained) and trained.isdisjoint(held)
        if self._is_strange:
            warnings.warn(self.STRANGE, RecordingWarning, stacklevel=4)

    def backward_begins(self) -> None:
        """A backward pass begins; those inside ``step(closure)`` are the optimizer's own."""
        self._counted = self._in_closure

    def step_begins(self, *, closure: bool) -> None:
        """The optimizer is about to step."""
        self._counted = self._in_closure = closure

    def step_ends(self) -> None:
        """A step is complete."""
        self._passes, self._in_closure = 0, False

    def once_more(self) -> bool:
        """Gradients were cleared without a step; asked at every module of the next forward.

        Returns:
            Whether it is time to say so.
        """
        if self._counted:
            return False
        self._counted = True
        self._passes += 1
        return self._passes == self._PATIENCE and not self._is_strange and not any_scaler()
