"""Which optimizer steps are recorded: every n-th, or dense at the start and sparse later."""

from __future__ import annotations

from dataclasses import dataclass

from keelscope.errors import UsageError

__all__ = ["Schedule", "as_schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Record each of the first `dense` steps, then every `every`-th.

    Example:
        >>> [step for step in range(12) if Schedule(every=5, dense=2).records(step)]
        [0, 1, 5, 10]
    """

    every: int = 1
    dense: int = 0

    def __post_init__(self) -> None:
        if self.every < 1 or self.dense < 0:
            raise UsageError(f"a schedule needs every >= 1 and dense >= 0; got every={self.every}, dense={self.dense}.")

    def records(self, step: int) -> bool:
        """Whether the step (completed optimizer steps before it, from 0) is recorded."""
        return step < self.dense or step % self.every == 0


def as_schedule(every: int | Schedule) -> Schedule:
    """An int as a schedule.

    Args:
        every: record every n-th step, or a schedule.

    Returns:
        The schedule.

    Raises:
        UsageError: if it is neither a positive int nor a `Schedule`.
    """
    if isinstance(every, Schedule):
        return every
    if isinstance(every, bool) or not isinstance(every, int):
        raise UsageError(f"every must be a positive int or a keelscope.Schedule; got {every!r}.")
    return Schedule(every)
