"""Pre-LN with further norms on or inside the branch (Sub-LN, NormFormer, Sandwich-LN, Peri-LN) or none at all (DyT)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from keelscope.models.checks import flag, number
from keelscope.models.residual import Place, SubLayer, make_norm
from keelscope.models.sublayers import Attention

if TYPE_CHECKING:
    from keelscope.models.config import ModelConfig

__all__ = ["DyT", "DynamicTanh", "HeadScale", "NormFormer", "PeriLN", "SandwichLN", "SubLN"]


class SubLN(SubLayer):
    """Sub-LN (Magneto): a second norm inside the branch, before its last matrix.

    Equation:
        x <- x + W_out n(G(n(x))), with F = W_out G
    Init:
        Feed-forward, value and output matrices times sqrt(ln L), L = 2N sub-layers; not with SwiGLU.
    Expect:
        As pre_ln, with more power on the stream: about 1 + L ln L at the top.
    Source:
        Wang et al., arXiv 2210.06423.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "sub_ln"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.factor = 1.0 if place.config.feed_forward == "swiglu" else math.sqrt(math.log(place.depth))
        self.norm = place.norm()
        for unit in self.units:
            unit.inner_norm = place.norm(unit.output.in_features)

    def adjust_init(self) -> None:  # noqa: D102  # the init is the class's
        for matrix in self.value_path():
            matrix.weight.mul_(self.factor)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        stream: Tensor = x + self.branch(self.norm(x))
        return stream


class HeadScale(nn.Module):
    """One learned factor per attention head, on the joined heads.

    Args:
        heads: Number of heads.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(heads))

    def forward(self, joined: Tensor) -> Tensor:
        """Scale each head.

        Args:
            joined: ``[batch, position, width]``, head after head.

        Returns:
            Same shape.
        """
        return joined * self.scale.repeat_interleave(joined.shape[-1] // len(self.scale))


class NormFormer(SubLayer):
    """NormFormer: Pre-LN with a norm on the attention output, one after the activation, and a factor per head.

    Equation:
        attention: x <- x + n'(attn(n(x))), heads scaled before the output matrix;
        feed-forward: x <- r x + W2 n'(phi(W1 n(x)))
    Init:
        Any. Head factors and r are 1.
    Expect:
        As pre_ln; the stream's power is about 1 + L at the top.
    Source:
        Shleifer et al., arXiv 2110.09456.

    Args:
        place: Where the sub-layer stands.
        residual_scale: Whether the feed-forward shortcut has a learned factor r per feature.
    """

    name: ClassVar[str] = "normformer"

    def __init__(self, place: Place, *, residual_scale: bool = False) -> None:
        super().__init__(place)
        self.norm = place.norm()
        self.output_norm = place.norm() if place.is_attention else None
        scaled = flag("residual_scale", residual_scale) and not place.is_attention
        self.residual_scale = nn.Parameter(torch.ones(place.config.width)) if scaled else None
        for unit in self.units:
            attention = isinstance(unit, Attention)
            unit.inner_norm = HeadScale(place.config.heads) if attention else place.norm(unit.output.in_features)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        output: Tensor = self.branch(self.norm(x))
        if self.output_norm is not None:
            output = self.output_norm(output)
        return (x if self.residual_scale is None else self.residual_scale * x) + output


class SandwichLN(SubLayer):
    """Sandwich-LN: a norm before and a norm after each branch.

    Equation:
        x <- x + n'(F(n(x)))
    Init:
        Any.
    Expect:
        The stream's power grows by 1 per sub-layer whatever the init; parameter gradients fall as 1/sqrt(L).
    Source:
        Ding et al., CogView, arXiv 2105.13290.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "sandwich_ln"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.norm = place.norm()
        self.output_norm = place.norm()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.output_norm(self.branch(self.norm(x)))
        return stream


class PeriLN(SubLayer):
    """Peri-LN: Sandwich-LN with a norm on the embedding.

    Equation:
        x <- x + n'(F(n(x))), x_0 = n(embedding)
    Init:
        Any.
    Expect:
        As sandwich_ln; the stream starts at power 1 whatever the embedding.
    Source:
        Kim et al., arXiv 2502.02732.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "peri_ln"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.norm = place.norm()
        self.output_norm = place.norm()

    def opening(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        return make_norm(config)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.output_norm(self.branch(self.norm(x)))
        return stream


class DynamicTanh(nn.Module):
    """``gamma tanh(a x) + beta``, an element-wise substitute for a norm.

    Args:
        width: Number of features.
        slope: a at the beginning.
    """

    def __init__(self, width: int, slope: float) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(slope))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Squash each entry.

        Args:
            x: ``[..., width]``.

        Returns:
            Same shape.
        """
        return self.weight * torch.tanh(self.slope * x) + self.bias


class DyT(SubLayer):
    """DyT: Pre-LN with a tanh in place of every norm.

    Equation:
        x <- x + F(d(x)), d(x) = gamma tanh(a x) + beta
    Init:
        Any. a = 0.5.
    Expect:
        No scale invariance: the stream's power grows faster than linearly, the gradient grows towards the input.
    Source:
        Zhu et al., arXiv 2503.10622 (for LLaMA 7B: a = 0.8 before attention, 0.2 elsewhere).

    Args:
        place: Where the sub-layer stands.
        attention_slope: a before attention.
        slope: a elsewhere.
    """

    name: ClassVar[str] = "dyt"

    def __init__(self, place: Place, *, attention_slope: float = 0.5, slope: float = 0.5) -> None:
        super().__init__(place)
        self.slope = number("slope", slope, above=0)
        start = number("attention_slope", attention_slope, above=0) if place.is_attention else self.slope
        self.norm = DynamicTanh(place.config.width, start)

    def closing(self, config: ModelConfig) -> nn.Module | None:  # noqa: D102
        return None if config.final_norm is False else DynamicTanh(config.width, self.slope)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.branch(self.norm(x))
        return stream
