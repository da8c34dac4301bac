"""When an optimizer step is complete: counted from the optimizers' own hooks, or from ``watch.step()``.

With several optimizers (a GAN, one optimizer per parameter) a step is complete when each has stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.optim import Optimizer

from keelscope.errors import UsageError

__all__ = ["StepClock", "as_optimizers"]


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
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    return tuple(_as_optimizer(one) for one in (optimizer if several else [optimizer]))  # type: ignore[union-attr]


def _as_optimizer(candidate: object) -> Optimizer:
    inner = candidate
    while not hasattr(inner, "register_step_pre_hook") and hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not hasattr(inner, "register_step_pre_hook"):
        raise UsageError(f"optimizer= takes torch optimizers; got {type(candidate).__name__}.")
    return inner  # type: ignore[return-value]


class StepClock:
    """Counts completed steps, and tells when each optimizer is about to step and has stepped."""

    def __init__(
        self,
        optimizers: tuple[Optimizer, ...],
        before: Callable[[Optimizer], None],
        after: Callable[[Optimizer, bool], None],
    ) -> None:
        self.completed = 0
        self._waiting_for = {id(optimizer) for optimizer in optimizers}
        self._stepped: set[int] = set()
        self._after = after
        self._handles = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(lambda opt, *_: before(opt)))
            self._handles.append(optimizer.register_step_post_hook(lambda opt, *_: self._note(opt)))

    @property
    def partial(self) -> bool:
        """Whether some but not all optimizers have stepped."""
        return bool(self._stepped)

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
