"""Initialisations of the matrices, by name, drawn from a generator of their own.

`transformer` draws in a fixed order: embedding, head, then branch after branch. Models that differ in their scheme only
start from the same matrices, and a deeper one continues the shallower one's.

    unit_gain   N(0, 1/fan_in): a branch keeps the variance of its input. Embedding N(0, 1).
    xavier      N(0, 2/(fan_in + fan_out)). Embedding N(0, 1).
    torch       U(-1, 1)/sqrt(fan_in), variance 1/(3 fan_in): the default of torch.nn.Linear. Embedding N(0, 1).
    normal      N(0, .02^2) everywhere, as GPT-2 and Keel's paper have it.
    scaled      as normal, with output projections times 1/sqrt(2L), L sub-layers. Secondary texts on Keel ask for it,
                the paper does not. GPT-2's own rule, 1/sqrt(2N) for N blocks, is the scheme gpt2_scaled_init.
    scale_norm  as unit_gain, with each row scaled to length 1 (the name occurs in secondary texts on Keel without a
                definition, and not in the paper; this is our reading). Embedding N(0, 1).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Generator, Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from keelscope.models.config import ModelConfig

__all__ = ["DRAWS", "draw_branch", "draw_embedding", "draw_ends"]

SMALL_STD: Final = 0.02


def _normal(weight: Tensor, generator: Generator) -> None:
    weight.normal_(0.0, SMALL_STD, generator=generator)


def _unit_gain(weight: Tensor, generator: Generator) -> None:
    weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


def _xavier(weight: Tensor, generator: Generator) -> None:
    weight.normal_(0.0, math.sqrt(2.0 / (weight.shape[-1] + weight.shape[-2])), generator=generator)


def _torch(weight: Tensor, generator: Generator) -> None:
    bound = weight.shape[-1] ** -0.5
    weight.uniform_(-bound, bound, generator=generator)


def _scale_norm(weight: Tensor, generator: Generator) -> None:
    weight.normal_(generator=generator)
    weight.div_(torch.linalg.vector_norm(weight, dim=-1, keepdim=True))


DRAWS: Final[dict[str, Callable[[Tensor, Generator], None]]] = {
    "normal": _normal,
    "scale_norm": _scale_norm,
    "scaled": _normal,
    "torch": _torch,
    "unit_gain": _unit_gain,
    "xavier": _xavier,
}
"""Name -> function that fills a matrix ``[..., fan_out, fan_in]`` in place."""


@torch.no_grad()
def draw_branch(branch: nn.Module, config: ModelConfig, generator: Generator) -> None:
    """Fill the matrices of a branch; biases become 0, norms and gates keep the values they were made with.

    Args:
        branch: Attention or feed-forward, changed in place.
        config: Names the init.
        generator: Source of the numbers.
    """
    for name, module in branch.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        DRAWS[config.init](module.weight, generator)
        if config.init == "scaled" and name.endswith("output"):
            module.weight.mul_((2 * config.depth) ** -0.5)
        if module.bias is not None:
            module.bias.zero_()


@torch.no_grad()
def draw_ends(embedding: nn.Embedding, head: nn.Linear, config: ModelConfig, generator: Generator) -> None:
    """Fill the token embedding and the head.

    Args:
        embedding: Changed in place.
        head: Changed in place.
        config: Names the init and, optionally, the standard deviation of the embedding.
        generator: Source of the numbers.
    """
    draw_embedding(embedding, config, generator)
    DRAWS[config.init](head.weight, generator)


@torch.no_grad()
def draw_embedding(embedding: nn.Embedding, config: ModelConfig, generator: Generator) -> None:
    """Fill a table of tokens or positions.

    Args:
        embedding: Changed in place.
        config: Names the init and, optionally, the standard deviation.
        generator: Source of the numbers.
    """
    std = config.embedding_std or (SMALL_STD if config.init in {"normal", "scaled"} else 1.0)
    embedding.weight.normal_(0.0, std, generator=generator)
