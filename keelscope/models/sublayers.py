"""The two branches of a transformer block, attention and feed-forward, as plain modules ``F: stream -> stream``.

A branch knows nothing of residual additions: `residual.Place.branch` builds it and a scheme decides how its output
meets the stream. The few places inside a branch where some schemes put a norm are optional submodules, None by
default and absent from the module tree then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from keelscope.models.config import ModelConfig

__all__ = ["Attention", "FeedForward", "Rotary", "unturned"]


def unturned(x: Tensor) -> Tensor:
    """Queries or keys as they are, for a model without rotary positions.

    Args:
        x: ``[batch, head, position, feature]``.

    Returns:
        The same tensor.
    """
    return x


class Rotary:
    r"""Rotary positions: features i and i + d/2 of a head turn by the angle ``position * base^(-2i/d)``.

    The scalar product of a turned query and a turned key depends on the distance of their positions only. One
    instance serves all attention branches of a model. It is no module, since it holds nothing that is learned: its
    tables are kept per device and precision and grow to the longest sequence seen.

    Args:
        size: Number of features of a head, even.
        base: Base of the frequencies.

    Source: Su et al., arXiv 2104.09864.
    """

    def __init__(self, size: int, base: float = 10_000.0) -> None:
        self.size = size
        self.base = base
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def _table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[position, pair]``, computed in float64: large angles lose digits in float32."""
        length = x.shape[-2]
        known = self._tables.get((x.device, x.dtype))
        if known is None or known[0].shape[0] < length:
            exponents = torch.arange(0, self.size, 2, dtype=torch.float64) / self.size
            angles = torch.outer(torch.arange(length, dtype=torch.float64), self.base**-exponents)
            known = angles.cos().to(x.device, x.dtype), angles.sin().to(x.device, x.dtype)
            self._tables[x.device, x.dtype] = known
        return known[0][:length], known[1][:length]

    def __call__(self, x: Tensor) -> Tensor:
        """Turn queries or keys.

        Args:
            x: Queries or keys, ``[batch, head, position, feature]``.

        Returns:
            Same shape.
        """
        cosine, sine = self._table(x)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention.

    Args:
        config: Sizes, bias and dropout.
        rotary: The rotary positions of the model, or `unturned`.

    The optional submodules ``query_norm``, ``key_norm`` and ``value_norm`` act per head
    (``[batch, head, position, feature]``), ``inner_norm`` acts on the joined heads before the output projection.
    """

    def __init__(self, config: ModelConfig, rotary: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.scale = (width // config.heads) ** -0.5
        self.rotary = rotary
        self.query = nn.Linear(width, width, bias=config.bias)
        self.key = nn.Linear(width, width, bias=config.bias)
        self.value = nn.Linear(width, width, bias=config.bias)
        self.output = nn.Linear(width, width, bias=config.bias)
        self.dropout = config.dropout
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        self.value_norm: nn.Module | None = None
        self.inner_norm: nn.Module | None = None

    def _split(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """Return ``[batch, head, position, feature]`` of ``[batch, position, width]``, each head normalised."""
        batch, length, width = projected.shape
        heads = projected.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        return heads if norm is None else norm(heads)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it.

        Args:
            x: ``[batch, position, width]``.

        Returns:
            Same shape.
        """
        query = self.rotary(self._split(self.query(x), self.query_norm))  # [batch, head, position, feature]
        key = self.rotary(self._split(self.key(x), self.key_norm))
        value = self._split(self.value(x), self.value_norm)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        joined = mixed.transpose(1, 2).flatten(2)  # [batch, position, width]
        if self.inner_norm is not None:
            joined = self.inner_norm(joined)
        return F.dropout(self.output(joined), self.dropout, self.training)


class FeedForward(nn.Module):
    r"""Position-wise branch: ``W2 gelu(W1 x)``, ``W2 relu(W1 x)`` or SwiGLU ``W2 (silu(Wg x) * W1 x)``.

    Args:
        config: Sizes, kind, bias and dropout.

    The optional submodule ``inner_norm`` acts on the hidden features before the last matrix, ``hidden_scale`` on what
    enters the activation.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.feed_forward
        self.hidden = nn.Linear(config.width, config.hidden, bias=config.bias)
        if self.kind == "swiglu":
            self.gate = nn.Linear(config.width, config.hidden, bias=config.bias)
        self.output = nn.Linear(config.hidden, config.width, bias=config.bias)
        self.dropout = config.dropout
        self.inner_norm: nn.Module | None = None
        self.hidden_scale: nn.Module | None = None

    def _activate(self, x: Tensor) -> Tensor:
        entering: Tensor = self.gate(x) if self.kind == "swiglu" else self.hidden(x)
        if self.hidden_scale is not None:
            entering = self.hidden_scale(entering)
        if self.kind == "swiglu":
            hidden: Tensor = self.hidden(x)
            return F.silu(entering) * hidden
        return F.relu(entering) if self.kind == "relu" else F.gelu(entering)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself.

        Args:
            x: ``[batch, position, width]``.

        Returns:
            Same shape.
        """
        hidden = self._activate(x)  # [batch, position, hidden]
        if self.inner_norm is not None:
            hidden = self.inner_norm(hidden)
        return F.dropout(self.output(hidden), self.dropout, self.training)
