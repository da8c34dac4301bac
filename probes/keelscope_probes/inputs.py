"""What modules are given: the first floating tensor among positional and keyword arguments, before the module runs."""

from __future__ import annotations

from keelscope.probe import Tap, TensorProbe
from keelscope.statistics import MAX_ABS, MEAN, NONFINITE_COUNT, RMS, VARIANCE, ZERO_FRACTION

__all__ = ["INPUTS"]

INPUTS = TensorProbe("inputs", Tap.INPUT, (MEAN, VARIANCE, RMS, MAX_ABS, ZERO_FRACTION, NONFINITE_COUNT))
