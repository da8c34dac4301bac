"""How attention spreads its weight: entropy, largest weight and the mass on the first key, head by head.

Collapsing entropy goes before diverging losses (Zhai et al., arXiv 2303.06296), and heads with nothing to do rest on
the first key (attention sinks; Xiao et al., arXiv 2309.17453). The weights w are those of the softmax, before dropout,
at up to 64 evenly spaced queries of each sequence; a query that may attend to nothing is left out. Of a row of scores s
over keys, with m = max s and Z = sum exp(s - m):

```
entropy = -sum w log w = log Z - sum w (s - m)      entropy_share = entropy / log(number of allowed keys)
max_weight = max w = 1 / Z                          sink_mass = w of the first key
```

Each is the mean over batch and queries, by head; sums and counts merge. Heads beyond 128 are left out.

Example:
    >>> scores = torch.tensor([0.0, 0.0, -torch.inf]).expand(1, 2, 5, 3)  # [batch, head, query, key]
    >>> terms = ATTENTION.statistics[0].terms.of(scores).numpy()
    >>> [float(statistic.of(terms)[1].round(3)) for statistic in ATTENTION.statistics]
    [0.693, 1.0, 0.5, 0.5]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope.probe import Tap, TensorProbe, Tensors
from keelscope.statistics import Columns, Statistic, additive

__all__ = ["ATTENTION"]

MOST_HEADS = 128
_EVERY = 10
_MASKED = -5000.0
"""Masks add -inf, the smallest number of the dtype or -1e4. A key this far below the best one is masked, and so is a
whole query whose best key lies below: softmax would spread its weight evenly over what it may not see."""
_SUMS = ("queries", "entropy", "choices", "share", "largest", "first")


def _scores(tensors: Tensors, _: nn.Module) -> Tensors | None:
    """Scores ``[batch, head, query, key]`` of the first 128 heads, in float32 or float64."""
    scores = tensors[0]
    if scores.dim() != 4 or scores.layout is not torch.strided or scores.is_complex():
        return None
    return (scores[:, :MOST_HEADS].to(torch.promote_types(scores.dtype, torch.float32)),)


def _sums_of(scores: Tensor) -> Tensor:
    """Sums over batch and queries, ``[6 x 128]``: one row per entry of `_SUMS`, one column per head."""
    sums = scores.new_zeros((len(_SUMS), MOST_HEADS), dtype=torch.float64)
    if scores.numel():
        rows = torch.stack(_of_queries(scores))  # [sum, batch, head, query]
        sums[:, : scores.shape[1]] = rows.sum((1, 3), dtype=torch.float64)
    return sums.reshape(-1)


def _of_queries(scores: Tensor) -> tuple[Tensor, ...]:
    """What is summed, ``[batch, head, query]`` each; zero where a query has no key, NaN where a score is NaN."""
    top = scores.amax(-1, keepdim=True)
    some = ~(top < _MASKED).squeeze(-1)  # NaN is something
    gaps = scores - top  # [batch, head, query, key]
    keys = torch.count_nonzero(gaps > _MASKED, dim=-1)
    weights = gaps.exp()
    total = weights.sum(-1)
    first = weights[..., 0] / total
    entropy = total.log() - weights.mul_(gaps.clamp_(min=_MASKED)).sum(-1) / total
    choice = some & (keys != 1)
    share = entropy / keys.log()
    zero = torch.zeros_like(total)
    kept = [torch.where(some, value, zero) for value in (entropy, 1 / total, first)]
    counts = some.to(total.dtype), choice.to(total.dtype)
    return counts[0], kept[0], counts[1], torch.where(choice, share, zero), kept[1], kept[2]


_TERMS = additive("attention_rows", tuple(f"{name}_{head}" for name in _SUMS for head in range(MOST_HEADS)), _sums_of)


def _mean(total: str, number: str) -> Callable[[Columns], NDArray[np.float64]]:
    """Mean by head, ``[..., head]``."""

    def finish(t: Columns) -> NDArray[np.float64]:
        sums, counts = (np.stack([t[f"{name}_{i}"] for i in range(MOST_HEADS)], axis=-1) for name in (total, number))
        return np.where(counts > 0, sums / counts, np.nan)

    return finish


def _heads(t: Columns) -> NDArray[np.int64]:
    """Number of heads: up to the last one with a query."""
    last = [np.where(t[f"queries_{i}"] > 0, i + 1, 0) for i in range(MOST_HEADS)]
    heads: NDArray[np.int64] = np.stack(last).max(axis=0)
    return heads


def _per_head(name: str, finish: Callable[[Columns], NDArray[np.float64]], unit: str, doc: str) -> Statistic:
    heads = tuple(map(float, range(MOST_HEADS)))
    dims, coords = ("head",), {"head": heads}
    return Statistic(name, _TERMS, finish, unit, doc, dims, coords, extent=_heads, across_ranks="mean")


ENTROPY = _per_head(
    "entropy",
    _mean("entropy", "queries"),
    "nat",
    "Entropy of a query's attention weights, -sum(w log w), mean over queries; 0 where all weight is on one key.",
)
ENTROPY_SHARE = _per_head(
    "entropy_share",
    _mean("share", "choices"),
    "1",
    "Entropy over the largest possible one, the log of the number of allowed keys; mean over queries with a choice.",
)
MAX_WEIGHT = _per_head(
    "max_weight", _mean("largest", "queries"), "1", "Largest attention weight of a query, mean over queries."
)
SINK_MASS = _per_head(
    "sink_mass", _mean("first", "queries"), "1", "Attention weight on the first key, mean over queries."
)

ATTENTION = TensorProbe(
    "attention", Tap.ATTENTION, (ENTROPY, ENTROPY_SHARE, MAX_WEIGHT, SINK_MASS), every=_EVERY, views=_scores
)
