"""`EpsilonSchedule`: an epsilon of the norms that falls during training.

Secondary texts on Keel describe one (some call it SLED); the paper keeps 1e-5 throughout. `keelscope.training` applies
a schedule before each step, so that its effect can be measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keelscope.models.checks import number, whole

if TYPE_CHECKING:
    from torch import nn

__all__ = ["EpsilonSchedule", "set_epsilon"]


@dataclass(frozen=True, slots=True)
class EpsilonSchedule:
    """Epsilon from start to end in equal factors over a number of steps, and constant after that.

    Raises:
        ValueError: For a value that cannot be used.

    Example:
        >>> schedule = EpsilonSchedule(start=1e-5, end=1e-7, steps=4)
        >>> [f"{schedule.at(step):.0e}" for step in (0, 2, 4, 100)]
        ['1e-05', '1e-06', '1e-07', '1e-07']
    """

    start: float = 1e-5
    """Epsilon at step 0."""
    end: float = 1e-6
    """Epsilon from step `steps` on; equal to `start` for a constant."""
    steps: int = 1000
    """Steps from start to end."""

    def __post_init__(self) -> None:
        number("start", self.start, above=0)
        number("end", self.end, above=0)
        whole("steps", self.steps, 1)

    def at(self, step: int) -> float:
        """The epsilon of a step.

        Args:
            step: Step from 0.

        Returns:
            A positive number.
        """
        progress = min(step, self.steps) / self.steps
        return float(self.start * (self.end / self.start) ** progress)


def set_epsilon(model: nn.Module, epsilon: float) -> int:
    """Give every norm of a model the same epsilon.

    Args:
        model: Any model; a norm is a module with a number called ``eps``.
        epsilon: The new epsilon.

    Returns:
        How many norms were found.
    """
    norms: list[Any] = [module for module in model.modules() if isinstance(getattr(module, "eps", None), float)]
    for norm in norms:
        norm.eps = epsilon
    return len(norms)
