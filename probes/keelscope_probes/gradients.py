"""Gradients with respect to module outputs, of all entries and per token over the later half of positions.

In a causal model the gradient piles up on the first tokens, so the norm of the whole tensor can look healthy while
later tokens receive nothing; their own level is recorded beside it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelscope.hostsums import host_late_tokens
from keelscope.kernel import Routine
from keelscope.onhost import place_of
from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import MAX_ABS, NONFINITE_COUNT, NORM, RMS, ZERO_FRACTION, Columns, Statistic, Terms

__all__ = ["GRADIENTS"]


def _late_tokens_of(gradient: Tensor) -> Tensor:
    """``[sum of log10 norms, tokens above 0, tokens at 0]`` over the later half of ``[batch, position, feature]``."""
    if gradient.dim() != 3 or gradient.layout != torch.strided or gradient.is_complex() or gradient.numel() == 0:
        return torch.zeros(3, dtype=torch.float64, device=gradient.device)
    place = place_of(gradient)
    if place is not None:
        return torch.from_numpy(host_late_tokens(place, tuple(gradient.shape)))
    late = gradient[:, gradient.shape[1] // 2 :]  # [batch, late position, feature]
    norms = torch.linalg.vector_norm(late, dim=-1, dtype=torch.float64)  # [batch, late position]
    zero = norms == 0
    zeros = torch.count_nonzero(zero)
    total = norms.masked_fill_(zero, 1.0).log10_().sum()
    return torch.stack([total, norms.numel() - zeros, zeros])


def _shifted(terms: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """A common factor adds its logarithm once per token."""
    with np.errstate(divide="ignore"):
        logs = terms[..., 0] + terms[..., 1] * np.log10(factor)
    return np.stack([logs, terms[..., 1], terms[..., 2]], axis=-1)


_LATE_TOKENS = Terms(
    "late_tokens",
    ("logs", "positive", "zeros"),
    _late_tokens_of,
    np.add,
    routine=Routine.LATE_TOKENS,
    rescale=_shifted,
)


def _level(t: Columns) -> NDArray[np.float64]:
    return np.where(t["positive"] > 0, t["logs"] / t["positive"], np.nan)


def _zero_share(t: Columns) -> NDArray[np.float64]:
    tokens = t["positive"] + t["zeros"]
    return np.where(tokens > 0, t["zeros"] / tokens, np.nan)


LATE_TOKEN_LEVEL = Statistic(
    "late_token_level",
    _LATE_TOKENS,
    _level,
    "decades",
    "Mean log10 of per-token gradient norms over the later half of positions, tokens with norm > 0 only.",
    across_ranks="mean",
)
LATE_TOKEN_ZERO_FRACTION = Statistic(
    "late_token_zero_fraction",
    _LATE_TOKENS,
    _zero_share,
    "1",
    "Share of tokens in the later half of positions whose gradient is exactly 0.",
    across_ranks="mean",
)

GRADIENTS = TensorProbe(
    "gradients",
    Tap.OUTPUT_GRADIENT,
    (NORM, RMS, MAX_ABS, ZERO_FRACTION, NONFINITE_COUNT, LATE_TOKEN_LEVEL, LATE_TOKEN_ZERO_FRACTION),
)
