"""Models whose shape is measured: tiles with the blocks of a large model, few of them, so that many pairs fit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["WORKLOADS", "Block", "Stack", "Training", "Workload"]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A pre-norm transformer block as people write it: 10 modules, 12 parameters, two residual sub-layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    def __init__(self, blocks: int, width: int, heads: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def hide_torchvision() -> None:
    """The pictures of transformers are not needed, and a torchvision built for another torch cannot be imported."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]


def gpt2(layers: int, vocabulary: int) -> nn.Module:
    hide_torchvision()
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, vocab_size=vocabulary, n_positions=128, **settings))


def resnet(depths: tuple[int, ...]) -> nn.Module:
    hide_torchvision()
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(depths=list(depths), num_labels=10))


@dataclass(frozen=True, slots=True)
class Workload:
    """One model shape: a tile of it is timed, the whole only quoted."""

    name: str
    doc: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    blocks: str
    """Class name of the blocks; norms are named after it."""
    pairs: float = 1.0
    """Share of the pairs asked for: fewer where steps are long."""
    trainings: int = 1
    """How often it is measured: where the same tensors lie decides about 1 to 2 %."""
    whole: Callable[[], nn.Module] | None = None


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def make() -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, vocabulary, (batch, length + 1))
        return drawn[:, :-1], drawn[:, 1:].flatten()

    return make


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 96, 96), torch.randint(0, 10, (2,))


WORKLOADS = (
    Workload(
        "W1",
        "transformer, d=128, 4 heads, T=64, B=4; tile of 4 blocks (the whole: 128)",
        lambda: Stack(4, 128, 4),
        tokens(4, 64, 256),
        "Block",
        trainings=3,
        whole=lambda: Stack(128, 128, 4),
    ),
    Workload(
        "W2",
        "GPT-2 small of transformers, d=768, 12 heads, T=128, B=2; tile of 1 block and 1,024 words (the whole: 12)",
        lambda: gpt2(1, 1024),
        tokens(2, 128, 1024),
        "GPT2Block",
        0.2,
    ),
    Workload(
        "W3",
        "transformer, d=64, 4 heads, T=32, B=1; tile of 10 blocks (the whole: 1,000)",
        lambda: Stack(10, 64, 4),
        tokens(1, 32, 256),
        "Block",
        trainings=4,
        whole=lambda: Stack(1000, 64, 4),
    ),
    Workload(
        "W4",
        "ResNet-50 of transformers, 96 x 96 pixels, B=2; tile of one bottleneck per stage (the whole: 3, 4, 6, 3)",
        lambda: resnet((1, 1, 1, 1)),
        images,
        "ResNetBottleNeckLayer",
        0.2,
    ),
    Workload(
        "W5",
        "W2 compiled with aot_eager; recorded steps run without the compiler",
        lambda: torch.compile(gpt2(1, 1024), backend="aot_eager"),
        tokens(2, 128, 1024),
        "GPT2Block",
        0.2,
    ),
)


class Training:
    """One model and one fixed batch; `step` is a whole training step."""

    def __init__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        self.model, (self.x, self.y) = model, batch
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.size = 0  # bytes of the run file, once it is closed

    def step(self) -> None:
        logits = self.model(self.x)
        logits = getattr(logits, "logits", logits)
        F.cross_entropy(logits.flatten(0, -2), self.y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
