"""`MixtureOfExperts`: a feed-forward branch in which every token is handled by a few of many small networks.

It takes the place of `sublayers.FeedForward` when a configuration asks for experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from keelscope.models.sublayers import FeedForward

if TYPE_CHECKING:
    from collections.abc import Iterable

    from keelscope.models.config import ModelConfig

__all__ = ["MixtureOfExperts"]


class MixtureOfExperts(nn.Module):
    """Sum over the k experts with the largest router scores, weighted by the softmax over those k scores.

    No token is dropped and no balancing loss is added: the router is trained by the language-model loss alone.

    Args:
        config: Number of experts, experts per token, and the sizes of each.

    Source: Shazeer et al., arXiv 1701.06538; softmax over the chosen k as in Mixtral, arXiv 2401.04088.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.chosen = config.experts_per_token
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        """Send each position to its experts.

        Args:
            x: ``[batch, position, width]``.

        Returns:
            Same shape.
        """
        tokens = x.flatten(0, 1)  # [token, width]
        scores, experts = self.router(tokens).topk(self.chosen, dim=-1)  # [token, choice]
        weights = scores.softmax(-1)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(cast("Iterable[FeedForward]", self.experts)):
            token, choice = (experts == index).nonzero(as_tuple=True)
            output = expert(tokens[token]) * weights[token, choice].unsqueeze(-1)
            mixed = mixed.index_add(0, token, output.to(mixed.dtype))
        return mixed.view_as(x)
