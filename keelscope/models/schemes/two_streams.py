"""Schemes with a normalised and an accumulating stream side by side: ResiDual and SiameseNorm.

Their state is a pair of tensors ``[batch, position, width]`` each, and so is the output of every sub-layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from keelscope.models.checks import number
from keelscope.models.residual import Place, SubLayer

if TYPE_CHECKING:
    from keelscope.models.config import ModelConfig

__all__ = ["ResiDual", "SiameseNorm"]

Pair = tuple[Tensor, Tensor]


class Twice(nn.Module):
    """The embedding as both streams."""

    def forward(self, x: Tensor) -> Pair:
        """Double the stream.

        Args:
            x: ``[batch, position, width]``.

        Returns:
            The same tensor twice.
        """
        return x, x


class JoinPair(nn.Module):
    """``x + n(r)``: the normalised stream plus the accumulated one behind a norm.

    Args:
        norm: The norm n; None adds the accumulated stream as it is.
    """

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: Pair) -> Tensor:
        """Join the streams.

        Args:
            state: Normalised and accumulated stream.

        Returns:
            ``[batch, position, width]``.
        """
        x, accumulated = state
        return x + (accumulated if self.norm is None else self.norm(accumulated))


class ResiDual(SubLayer):
    """ResiDual: Post-LN with a second shortcut that nothing attenuates.

    Equation:
        y = F(x), r <- r + s y, x <- n(x + y); the head reads x + n(r)
    Init:
        Any. x_0 = r_0 = embedding, s = 1.
    Expect:
        A floor under the gradient instead of geometric decay.
    Source:
        Xie et al., arXiv 2304.14802.

    Args:
        place: Where the sub-layer stands.
        scale: Weight s of what the second stream takes up.
    """

    name: ClassVar[str] = "residual_dual"

    def __init__(self, place: Place, *, scale: float = 1.0) -> None:
        super().__init__(place)
        self.scale = number("scale", scale, above=0)
        self.norm = place.norm()

    def opening(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        del config
        return Twice()

    def closing(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        return JoinPair(super().closing(config))

    def forward(self, state: Pair) -> Pair:  # noqa: D102  # the equation is the class's
        x, accumulated = state
        output = self.branch(x)
        return self.norm(x + output), accumulated + self.scale * output


class SiameseNorm(SubLayer):
    """SiameseNorm: one branch that reads and writes a Post-LN and a Pre-LN stream at once.

    Equation:
        O = F(n_in(X + n_Y(Y))), X <- n_X(X + O / sqrt(l + 1)), Y <- Y + O; the head reads X + n(Y)
    Init:
        Any. X_0 = Y_0 = embedding; l = 0, 1, ... the sub-layer.
    Expect:
        Flat; the logits' variance is doubled at init.
    Source:
        arXiv 2602.08064, after a summary of its algorithm.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "siamese_norm"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.factor = (place.index + 1) ** -0.5
        self.norm_in = place.norm()
        self.norm_x = place.norm()
        self.norm_y = place.norm()

    def opening(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        del config
        return Twice()

    def closing(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        return JoinPair(super().closing(config))

    def forward(self, state: Pair) -> Pair:  # noqa: D102
        x, y = state
        output = self.branch(self.norm_in(x + self.norm_y(y)))
        return self.norm_x(x + self.factor * output), y + output
