"""Attention residuals: attention over depth in place of the sum.

The state is the tuple of all outputs so far, ``[batch, position, width]`` each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from keelscope.models.residual import Place, SubLayer

if TYPE_CHECKING:
    from keelscope.models.config import ModelConfig

__all__ = ["AttnRes", "DepthAttention"]


class DepthAttention(nn.Module):
    """``sum_i softmax_i(w . rms(v_i)) v_i``: one learned query over earlier outputs, 0 at the beginning.

    Args:
        width: Number of features.
        epsilon: Epsilon of the norm on the keys.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.query = nn.Parameter(torch.zeros(width))

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        """Average the values.

        Args:
            values: Embedding and branch outputs so far, ``[batch, position, width]`` each.

        Returns:
            Same shape as one of them.
        """
        stacked = torch.stack(values, dim=-2)  # [batch, position, layer, width]
        root = (stacked.square().mean(-1) + self.epsilon).sqrt()  # [batch, position, layer]
        weights = ((stacked @ self.query) / root).softmax(-1)
        return (weights.unsqueeze(-1) * stacked).sum(-2)


class AttendAndNorm(nn.Module):
    """The last depth attention and the final norm.

    Args:
        attention: The depth attention.
        norm: The final norm; None leaves its output as it is.
    """

    def __init__(self, attention: DepthAttention, norm: nn.Module | None) -> None:
        super().__init__()
        self.attention = attention
        self.norm = norm

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        """Read the stack.

        Args:
            values: Embedding and all branch outputs.

        Returns:
            ``[batch, position, width]``.
        """
        stream: Tensor = self.attention(values)
        return stream if self.norm is None else self.norm(stream)


class AttnRes(SubLayer):
    """Attention residuals: each branch reads a learned average of all earlier branch outputs.

    Equation:
        v_l = F(n(h_l)), h_l = sum over i < l of softmax_i(w_l . rms(v_i)) v_i, v_0 = embedding
    Init:
        Any. w = 0, a uniform average.
    Expect:
        Exactly pre_ln at init, since norms do not see the factor 1/l (up to epsilon). The output of a sub-layer is v_l,
        not a stream.
    Source:
        arXiv 2603.15031 (the full variant, without blocks).

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "attn_res"
    residual_topology = ({"form": "F(n c v)", "schemes": ("attn_res",), "branch": "branch", "norm_before": "norm"},)
    """What one entry is, for tools that look for a sum of shortcut and branch and find none."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        first = place.index == 0
        self.depth_attention = None if first else DepthAttention(place.config.width, place.config.epsilon)
        self.norm = place.norm()

    def closing(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        return AttendAndNorm(DepthAttention(config.width, config.epsilon), super().closing(config))

    @staticmethod
    def carry(state: Any, output: Any) -> tuple[Tensor, ...]:  # noqa: D102
        return (state, output) if isinstance(state, Tensor) else (*state, output)

    def forward(self, values: Tensor | tuple[Tensor, ...]) -> Tensor:  # noqa: D102
        reading = values if self.depth_attention is None else self.depth_attention(values)
        output: Tensor = self.branch(self.norm(reading))
        return output
