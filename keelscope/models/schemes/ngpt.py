"""nGPT: a transformer on the unit sphere."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keelscope.models.checks import number
from keelscope.models.residual import Place, SubLayer
from keelscope.models.sublayers import Attention, FeedForward

if TYPE_CHECKING:
    from keelscope.models.config import ModelConfig

__all__ = ["NGPT", "Scale", "UnitLength"]


class UnitLength(nn.Module):
    """``s x / |x|``, with a learned factor s per feature where a width is given.

    Args:
        width: Number of features of s; None is no factor.
    """

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.scale = None if width is None else nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Put each token on the sphere.

        Args:
            x: ``[..., feature]``.

        Returns:
            Same shape.
        """
        unit = F.normalize(x, dim=-1)
        return unit if self.scale is None else self.scale * unit


class Scale(nn.Module):
    """``s c x``, with a learned s that starts at 1 and a constant c.

    Args:
        width: Number of features of s; None is one number for all.
        constant: The constant c.
    """

    def __init__(self, width: int | None = None, constant: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(() if width is None else (width,)))
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        """Scale each feature.

        Args:
            x: ``[..., feature]``.

        Returns:
            Same shape.
        """
        return x * (self.scale * self.constant)


class NGPT(SubLayer):
    """nGPT: stream, branch outputs, queries, keys and the rows of every matrix have length 1.

    Equation:
        x <- u(x + a (u(F(x)) - x)), u(x) = x / |x|
    Init:
        Matrices are brought to unit length along the stream's features, at init and after every optimizer step.
        a = 0.05 per feature (stored as 1/sqrt(d)); factors on queries, keys, hidden features and logits are 1.
    Expect:
        Flat: as a Post-LN with alpha = (1 - a)/a = 19 and v = 1, so the shortcut loses 6e-4 decades per sub-layer.
        Parameter gradients do not depend on depth.
    Source:
        Loshchilov et al., arXiv 2410.01131; here with one factor for all logits instead of one per token.

    Args:
        place: Where the sub-layer stands.
        rate: a at the beginning.
    """

    name: ClassVar[str] = "ngpt"
    final_norm: ClassVar[bool] = False

    def __init__(self, place: Place, *, rate: float = 0.05) -> None:
        super().__init__(place)
        width = place.config.width
        self.rate_scale = number("rate", rate, above=0) * width**0.5
        self.rate = nn.Parameter(torch.full((width,), width**-0.5))
        self.unit = UnitLength()
        for part in self.units:
            if isinstance(part, Attention):
                part.scale = (width // place.config.heads) ** 0.5
                part.query_norm = UnitLength(width // place.config.heads)
                part.key_norm = UnitLength(width // place.config.heads)
            else:
                part.hidden_scale = Scale(place.config.hidden, width**0.5)

    def opening(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        del config
        return UnitLength()

    def closing(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        del config
        return Scale()

    @classmethod
    def constrain_ends(cls, embedding: nn.Embedding, head: nn.Linear) -> None:  # noqa: D102
        for weight in (embedding.weight, head.weight):
            weight.copy_(F.normalize(weight, dim=-1))

    def adjust_init(self) -> None:  # noqa: D102  # the init is the class's
        self.after_step()

    def after_step(self) -> None:  # noqa: D102
        for part in self.units:
            reading = [part.query, part.key, part.value] if isinstance(part, Attention) else _reading(part)
            for matrix in reading:
                matrix.weight.copy_(F.normalize(matrix.weight, dim=-1))
            part.output.weight.copy_(F.normalize(part.output.weight, dim=0))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        rate = (self.rate * self.rate_scale).abs()
        step: Tensor = self.unit(self.branch(x)) - x
        stream: Tensor = self.unit(x + rate * step)
        return stream


def _reading(part: FeedForward) -> list[nn.Linear]:
    return [part.hidden, part.gate] if part.kind == "swiglu" else [part.hidden]
