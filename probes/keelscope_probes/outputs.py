"""What modules put out: size, spread, zeros and non-finite entries of the first floating output."""

from __future__ import annotations

from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import KURTOSIS, MAX_ABS, MEAN, NONFINITE_COUNT, RMS, VARIANCE, ZERO_FRACTION

__all__ = ["OUTPUTS"]

OUTPUTS = TensorProbe(
    "outputs",
    Tap.OUTPUT,
    statistics=(MEAN, VARIANCE, RMS, MAX_ABS, ZERO_FRACTION, NONFINITE_COUNT),
    optional=(KURTOSIS,),
)
