"""The contract of a residual scheme: `SubLayer`, one residual addition, and `Place`, what it knows of the stack.

    embedding -> opening -> sublayers[0] -> ... -> sublayers[L - 1] -> closing -> head

A scheme is one subclass of `SubLayer` in a file of `keelscope.models.schemes`; nothing else changes when one is
added. Its keyword-only constructor parameters are its options; its docstring says equation, init, what to expect and
source, and `catalogue` reads them from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import nn

from keelscope.models.moe import MixtureOfExperts
from keelscope.models.norms import NORMS
from keelscope.models.sublayers import Attention, FeedForward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from keelscope.models.config import ModelConfig

__all__ = ["Place", "SubLayer", "make_norm"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sub-layer stands, and the parts it may be made of."""

    index: int
    """Position in the stack, 0 at the embedding."""
    config: ModelConfig
    """The model's sizes and ingredients."""
    rotary: Callable[[Tensor], Tensor]
    """Turns queries and keys by their position, shared by all attention branches."""

    @property
    def depth(self) -> int:
        """Number of sub-layers L of the model."""
        return self.config.depth

    @property
    def block(self) -> int:
        """Index of the block, 0 at the embedding."""
        return self.index // 2

    @property
    def is_attention(self) -> bool:
        """Whether the branch is attention (even positions) and not feed-forward."""
        return self.index % 2 == 0

    def norm(self, width: int | None = None) -> nn.Module:
        """A new norm of the model's kind.

        Args:
            width: Number of features; None is the width of the stream.

        Returns:
            The norm.
        """
        return make_norm(self.config, width)

    def branch(self) -> Attention | FeedForward | MixtureOfExperts:
        """A new branch F of the kind that belongs here.

        Returns:
            Attention, feed-forward or a mixture of experts.
        """
        if self.is_attention:
            return Attention(self.config, self.rotary)
        return MixtureOfExperts(self.config) if self.config.experts else FeedForward(self.config)


def make_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """A new norm of a model's kind.

    Args:
        config: Kind and epsilon.
        width: Number of features; None is the width of the stream.

    Returns:
        The norm.
    """
    return NORMS[config.norm](config.width if width is None else width, config.epsilon)


class SubLayer(nn.Module):
    """One residual addition: a branch F and the way its output meets the stream.

    Subclasses name themselves (`name`), build their norms and gates, and say the equation in `forward`. The stream
    is one tensor ``[batch, position, width]`` unless a scheme says otherwise.

    Args:
        place: Where the sub-layer stands.
    """

    residual_sublayers = 1
    """Residual additions per stack entry, for tools that count depth in sub-layers."""
    name: ClassVar[str] = ""
    """Name of the scheme; empty for a class that is not a scheme itself."""
    final_norm: ClassVar[bool] = True
    """Whether the head reads through a norm unless the configuration says otherwise."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.branch = place.branch()

    @property
    def units(self) -> list[Attention | FeedForward]:
        """The parts of the branch that end in an output matrix: the branch itself, or its experts."""
        if isinstance(self.branch, MixtureOfExperts):
            return list(cast("Iterable[FeedForward]", self.branch.experts))
        return [self.branch]

    def value_path(self) -> Iterator[nn.Linear]:
        """The matrices that a signal through the branch is multiplied with: all but router, query and key.

        Yields:
            Value and output projections of attention, every matrix of feed-forward.
        """
        for unit in self.units:
            yield from [unit.value] if isinstance(unit, Attention) else [unit.hidden]
            if isinstance(unit, FeedForward) and unit.kind == "swiglu":
                yield unit.gate
            yield unit.output

    @property
    def learning_rate_scale(self) -> float:
        """Factor on the learning rate of the branch's matrices that the scheme asks for."""
        return 1.0

    @property
    def adam_epsilon_scale(self) -> float:
        """Factor on Adam's epsilon of the branch's matrices that the scheme asks for."""
        return 1.0

    def opening(self, config: ModelConfig) -> nn.Module | None:
        """The module between embedding and stack, from ``[batch, position, width]`` to the scheme's state.

        Args:
            config: The model's configuration.

        Returns:
            The module (asked of the first sub-layer), or None when the state is the embedding itself.
        """
        del config
        return None

    def closing(self, config: ModelConfig) -> nn.Module | None:
        """The module between stack and head, from the scheme's state to ``[batch, position, width]``.

        Args:
            config: The model's configuration.

        Returns:
            The final norm or another module (asked of the last sub-layer), or None when the head reads the stream
            as it is.
        """
        wanted = self.final_norm if config.final_norm is None else config.final_norm
        return make_norm(config) if wanted else None

    @staticmethod
    def carry(state: Any, output: Any) -> Any:
        """The state that the next sub-layer gets.

        Args:
            state: What this sub-layer got.
            output: What it returned.

        Returns:
            The output, unless a scheme keeps more than that.
        """
        del state
        return output

    @classmethod
    def constrain_ends(cls, embedding: nn.Embedding, head: nn.Linear) -> None:
        """Restore what the scheme asks of embedding and head, at init and after each step (runs without gradient).

        Args:
            embedding: The token embedding.
            head: The head.
        """

    def adjust_init(self) -> None:
        """Change the freshly drawn weights as the scheme's init rule asks (runs without gradient)."""

    def after_step(self) -> None:
        """Restore what the scheme asks of its weights after an optimizer step (runs without gradient)."""

    def forward(self, x: Any) -> Any:
        """The equation of the scheme.

        Args:
            x: The stream.

        Returns:
            The stream after this residual addition.

        Raises:
            NotImplementedError: In this class, which is no scheme itself.
        """
        raise NotImplementedError
