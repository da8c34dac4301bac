"""Sizes of parameters, and of their gradients over a whole optimizer step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import SQUARES, Statistic

__all__ = ["CLIPPED_GRADIENTS", "PARAMETERS", "PARAMETER_GRADIENTS"]

NORM = Statistic(
    "norm",
    SQUARES,
    lambda t: np.where(t["count"] > 0, np.sqrt(t["squares"]), np.nan),
    "1",
    "Euclidean norm of all entries, sqrt(sum(x^2)).",
    across_ranks="root_sum_squares",
    grows=0.5,
)
RMS = Statistic(
    "rms",
    SQUARES,
    lambda t: np.sqrt(np.where(t["count"] > 0, t["squares"] / t["count"], np.nan)),
    "1",
    "Root mean square of the entries, sqrt(mean(x^2)).",
    across_ranks="root_sum_squares",
)

CLIPPED_NORM = replace(
    NORM,
    name="clipped_norm",
    doc="Euclidean norm of the gradient that the optimizer got, sqrt(sum(x^2)), after clipping.",
)

PARAMETERS = TensorProbe("parameters", Tap.PARAMETER, (NORM, RMS), every=10)
PARAMETER_GRADIENTS = TensorProbe("parameter_gradients", Tap.PARAMETER_GRADIENT, (NORM, RMS))
CLIPPED_GRADIENTS = TensorProbe(
    "clipped_gradients",
    Tap.STEP_GRADIENT,
    statistics=(),
    optional=(CLIPPED_NORM,),
    group="parameter_gradients",
)
