"""How alike the tokens of a sequence are: mean cosine similarity and effective rank, per sequence, then averaged.

In a stack whose tokens run together every token ends up with the same direction, whatever it began with: rank collapse
(Dong, Cordonnier and Loukas, arXiv 2103.03404). Tokens are scaled to length 1 first, so that the one or two tokens of
huge norm in trained language models do not pass for a collapse. A token that is exactly 0 has no direction and is left
out; so is a sequence with fewer than two others. A token that is not finite makes the value NaN.

With n tokens u of length 1 in a sequence:

```
cosine_similarity = mean of u_i . u_j over i != j     = (|sum_i u_i|^2 - n) / (n (n - 1))
effective_rank    = (sum lambda)^2 / sum lambda^2     = n^2 / sum_ij (u_i . u_j)^2
```

where lambda are the eigenvalues of the Gram matrix of the u. This is the participation ratio, which the squared entries
of the smaller of UU' and U'U give without any eigenvalue. It is at most the effective rank of Roy and Vetterli (2007),
the exponential of the spectrum's entropy, and equals it where all eigenvalues but those at 0 are equal. Both numbers
are means over sequences, so that their sums and the number of sequences merge.

Example:
    >>> apart, alike = torch.eye(4)[None], torch.ones(1, 4, 4)
    >>> [COSINE_SIMILARITY.value(x) for x in (apart, alike)], [EFFECTIVE_RANK.value(x) for x in (apart, alike)]
    ([0.0, 1.0], [4.0, 1.0])
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope.entries import constant, local_shard
from keelscope.probe import Tap, TensorProbe, Tensors
from keelscope.statistics import Columns, Statistic, additive

__all__ = ["TOKENS"]

_EVERY = 10
_AT_ONCE = 1 << 22
"""Entries scaled at a time: one or a few sequences."""


def _holds_others(module: nn.Module) -> bool:
    """Stack entries and sub-layers, not the single layers that they are made of."""
    return any(True for _ in module.children())


def _sequences(tensors: Tensors, _: nn.Module) -> Tensors | None:
    """Tokens ``[batch, position, feature]``."""
    x = local_shard(tensors[0])
    plain = x.dim() == 3 and x.layout is torch.strided and not x.is_nested and not x.is_complex()
    return (x,) if plain else None


def _sums_of(x: Tensor) -> Tensor:
    """``[sequences, sum of mean cosines, sum of effective ranks]``."""
    if not x.numel():
        return torch.zeros(3, dtype=torch.float64, device=x.device)
    size = max(1, _AT_ONCE // (x.shape[1] * x.shape[2]))
    with torch.autocast(x.device.type, enabled=False):  # it would round the products to half precision
        return torch.stack([_sums_of_some(part) for part in torch.split(x, size)]).sum(0)


def _sums_of_some(x: Tensor) -> Tensor:
    """With u the tokens of length 1: ``sum_ij cos = |sum u|^2`` and ``sum_ij cos^2 = |U'U|^2 = |UU'|^2``."""
    unit, tokens = _of_length_one(x)
    together = unit.sum(1).double().square().sum(-1)  # [sequence]
    gram = unit @ unit.mT if x.shape[1] < x.shape[2] else unit.mT @ unit  # the smaller of the two
    squares = torch.linalg.vector_norm(gram, dim=(1, 2), dtype=torch.float64).square()  # [sequence]
    several = tokens > 1
    cosines = (together - tokens) / (tokens * (tokens - 1))
    found = torch.stack([cosines, tokens.square() / squares])  # [statistic, sequence]
    sums = torch.where(several, found, constant(0.0, x.device)).sum(1)
    return torch.cat([several.sum(dtype=torch.float64)[None], sums])


def _of_length_one(x: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens over their norms, 0 for a token that is 0, ``[sequence, position, feature]``; and how many are not 0."""
    # Norms are summed in float64. What has length 1 is in range in float32, which GPUs multiply up to 64 times faster.
    x = x if x.dtype is torch.float64 else x.float()
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64).to(x.dtype)
    tokens = torch.count_nonzero(norms, dim=(1, 2)).double()  # [sequence]
    norms.masked_fill_(norms == 0, 1.0).masked_fill_(norms == torch.inf, torch.nan)
    return x / norms, tokens


def _mean(total: NDArray[np.float64], t: Columns) -> NDArray[np.float64]:
    return np.where(t["sequences"] > 0, total / t["sequences"], np.nan)


_TERMS = additive("token_directions", ("sequences", "cosine", "rank"), _sums_of)

COSINE_SIMILARITY = Statistic(
    "cosine_similarity",
    _TERMS,
    lambda t: _mean(t["cosine"], t),
    "1",
    "Cosine between two tokens of a sequence, (|sum u|^2 - n) / (n (n - 1)) over n tokens u of length 1; mean over "
    "sequences, 1 where all point the same way.",
    across_ranks="mean",
)
EFFECTIVE_RANK = Statistic(
    "effective_rank",
    _TERMS,
    lambda t: _mean(t["rank"], t),
    "1",
    "Participation ratio n^2 / sum_ij cos^2 of the spectrum of n tokens of length 1, between 1 (collapsed) and "
    "min(n, features); mean over sequences.",
    across_ranks="mean",
)

TOKENS = TensorProbe(
    "tokens",
    Tap.OUTPUT,
    (COSINE_SIMILARITY, EFFECTIVE_RANK),
    every=_EVERY,
    chooses=_holds_others,
    views=_sequences,
)
