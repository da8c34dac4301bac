"""What the optimizer adds to each parameter, absolute and relative to the parameter. Keeps a copy of the parameters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import SQUARES, Statistic, additive

__all__ = ["UPDATES"]


def _pair_of(update: Tensor, before: Tensor) -> Tensor:
    """``[sum of squared changes, sum of squared weights]``."""
    return torch.stack([SQUARES.of(update)[1], SQUARES.of(before)[1]])


_PAIR = additive("update_and_weight", ("update", "weight"), _pair_of, (2, 2))

UPDATES = TensorProbe(
    "updates",
    Tap.UPDATE,
    (
        Statistic(
            "norm",
            _PAIR,
            lambda t: np.sqrt(t["update"]),
            "1",
            "Norm of the change of one step, |w' - w|.",
            across_ranks="root_sum_squares",
            grows=0.5,
        ),
        Statistic(
            "ratio",
            _PAIR,
            lambda t: np.where(t["weight"] > 0, np.sqrt(t["update"]) / np.sqrt(t["weight"]), np.nan),
            "1",
            "Norm of the change over the norm of the parameter before it, |w' - w| / |w|.",
        ),
    ),
)
