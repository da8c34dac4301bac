r"""Units that stay at zero for a whole batch, and activations at the flat end of their function.

A unit of a rectifier whose input is at or below the threshold for every sample puts out zeros and gets no gradient; a
sigmoid, tanh or softmax far from its middle passes next to none. Both are looked at where they happen, before the
activation runs, also where the selection of sites leaves activations out; rectified tensors that enter a linear or
convolution layer are looked at there too, since many models call ``torch.relu`` and have no module for it. Data that
depends on no parameter is left out: pixels and words may be zero for a reason.

A unit is a feature, or a channel of ``[batch, channel, ...]``; its samples are all the rest. At most 256 units of a
layer and 64 positions of each member of the batch are read, evenly spaced.

```
dead_fraction      = share of units with relu(x) = 0 in every sample
active_fraction    = share of entries with relu(x) > 0
saturated_fraction = share of entries with slope < 1e-3 (sigmoid beyond +-6.9, tanh beyond +-4.1), or of the rows of a
                     softmax whose largest weight is above 0.999
```
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keelscope.entries import constant
from keelscope.probe import Tap, TensorProbe, Tensors
from keelscope.statistics import Columns, Statistic, Terms, additive

__all__ = ["ACTIVATIONS", "SATURATION"]

_EVERY = 10
_UNITS = 256
_POSITIONS = 64
_SLOPE = 1e-3
_TOKENS = 3
"""Axes of ``[batch, position, feature]``."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NEVER_ZERO = ("leaky", "prelu", "rrelu", "crelu")


def _zero_end(module: nn.Module) -> float | None:
    """The input up to which a rectifier puts out exactly 0; None for other modules. HF and user classes by name."""
    if isinstance(module, nn.Threshold):
        return float(module.threshold) if module.value == 0 else None
    if isinstance(module, nn.Hardswish | nn.Hardsigmoid):
        return -3.0
    name = type(module).__name__.lower()
    named = name.startswith("relu") or name.endswith("relu") or "relusquared" in name
    return 0.0 if named and not any(part in name for part in _NEVER_ZERO) and not any(module.children()) else None


def _is_consumer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, *_CONVOLUTIONS))


def _is_rectifier(module: nn.Module) -> bool:
    return _zero_end(module) is not None


def _sampled(x: Tensor, unit: int, units: int = _UNITS) -> Tensor:
    """``[batch, ..., unit]``: some units and positions, without a copy; every member of the batch."""
    between = [axis for axis in range(1, x.dim()) if axis != unit % x.dim()]
    most = {axis: round(_POSITIONS ** (1 / len(between))) for axis in between} | {unit % x.dim(): units}
    steps = (slice(None, None, max(1, math.ceil(x.shape[a] / most.get(a, x.shape[a] or 1)))) for a in range(x.dim()))
    return x[tuple(steps)].movedim(unit, -1)


def _unit_axis(module: nn.Module, dims: int) -> int:
    """Channels of what enters a convolution, and of images and volumes; else features."""
    if isinstance(module, _CONVOLUTIONS):
        return dims - 1 - len(module.kernel_size)
    return 1 if _is_rectifier(module) and dims > _TOKENS else dims - 1


def _rectified(tensors: Tensors, module: nn.Module) -> Tensors | None:
    """``[batch, ..., unit]``: what a rectifier puts out, or what enters a layer."""
    x = tensors[0]
    if x.layout is not torch.strided or x.is_nested or x.is_complex() or x.dim() < 2:
        return None
    x = _sampled(x, _unit_axis(module, x.dim()))  # [batch, ..., unit]
    end = _zero_end(module)
    return (x if end is None else (x - end).clamp(min=0),)


def _units_of(x: Tensor) -> Tensor:
    """``[samples, units, active entries, largest size of each unit]`` of ``[batch, ..., unit]``."""
    if not x.numel():
        return _NOTHING.to(x.device)
    samples = tuple(range(x.dim() - 1))
    peaks = torch.maximum(x.amax(samples), -x.amin(samples)).double()  # [unit]
    peaks = torch.cat([peaks, _NOTHING.to(x.device)[_HEAD : _HEAD + _UNITS - x.shape[-1]]])  # [256]
    sizes = (constant(size, x.device) for size in (x.numel() // x.shape[-1], x.shape[-1]))
    return torch.cat([torch.stack([*sizes, torch.count_nonzero(x).double()]), peaks])


def _merge(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Samples and active entries add up; of the rest the larger counts."""
    merged = np.maximum(a, b)
    merged[..., [0, 2]] = a[..., [0, 2]] + b[..., [0, 2]]
    return merged


_HEAD = 3
_NOTHING = torch.tensor([0.0, 0.0, 0.0] + [-math.inf] * _UNITS, dtype=torch.float64)
_PEAKS = tuple(f"peak_{i}" for i in range(_UNITS))
_UNIT_TERMS = Terms("units", ("samples", "units", "active", *_PEAKS), _units_of, _merge)


def _where_seen(t: Columns, values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(t["samples"] > 0, values, np.nan)


def _dead(t: Columns) -> NDArray[np.float64]:
    zero = np.stack([t[name] == 0 for name in _PEAKS], axis=-1)  # [..., unit]
    return _where_seen(t, zero.sum(-1) / t["units"])


DEAD_FRACTION = Statistic(
    "dead_fraction",
    _UNIT_TERMS,
    _dead,
    "1",
    "Share of the units that are exactly 0 in every sample of the step, among those that were read.",
    across_ranks="mean",
)
ACTIVE_FRACTION = Statistic(
    "active_fraction",
    _UNIT_TERMS,
    lambda t: _where_seen(t, t["active"] / (t["samples"] * t["units"])),
    "1",
    "Share of the entries that are not 0, among the units that were read.",
    across_ranks="mean",
)
SAMPLES = Statistic(
    "samples",
    _UNIT_TERMS,
    lambda t: _where_seen(t, t["samples"]),
    "1",
    "Number of samples that each unit was read in: members of the batch, times positions (64 each at most).",
    across_ranks="mean",
    grows=1.0,
)
UNITS = Statistic(
    "units",
    _UNIT_TERMS,
    lambda t: _where_seen(t, t["units"]),
    "1",
    "Number of units that were read, at most 256.",
    across_ranks="max",
)

_BOUNDS = {
    nn.Sigmoid: math.log((1 + math.sqrt(1 - 4 * _SLOPE)) / (1 - math.sqrt(1 - 4 * _SLOPE))),
    nn.Tanh: math.atanh(math.sqrt(1 - _SLOPE)),
    nn.Hardsigmoid: 3.0,
    nn.Hardtanh: 1.0,
}


def _is_bounded(module: nn.Module) -> bool:
    is_relu6 = isinstance(module, nn.ReLU6)  # a Hardtanh to torch
    return isinstance(module, (nn.Softmax, *_BOUNDS)) and not is_relu6


def _margins(tensors: Tensors, module: nn.Module) -> Tensors | None:
    """By how much each entry, or row of a softmax, is beyond the point where the function is flat."""
    x = tensors[0]
    if x.layout is not torch.strided or x.is_nested or x.is_complex() or not x.dim():
        return None
    if isinstance(module, nn.Softmax):
        dim = module.dim if module.dim is not None else -1
        if x.shape[dim] < 2:
            return None
        x = _sampled(x, dim, x.shape[dim]).float()  # [batch, ..., entry]
        rest = x.logsumexp(-1) - x.amax(-1)  # [batch, ...] = -log of the largest weight
        return (-math.log1p(-_SLOPE) - rest,)
    x = _sampled(x, x.dim() - 1)
    if isinstance(module, nn.Hardtanh):
        return (torch.maximum(module.min_val - x, x - module.max_val),)
    return (x.abs() - next(bound for kind, bound in _BOUNDS.items() if isinstance(module, kind)),)


_FLAT_TERMS = additive(
    "flat",
    ("entries", "flat"),
    lambda margin: torch.stack([constant(margin.numel(), margin.device), (margin > 0).sum().double()]),
)
SATURATED_FRACTION = Statistic(
    "saturated_fraction",
    _FLAT_TERMS,
    lambda t: np.where(t["entries"] > 0, t["flat"] / t["entries"], np.nan),
    "1",
    "Share of the entries of a sigmoid or tanh where its slope is below 0.001, or of the rows of a softmax whose "
    "largest weight is above 0.999.",
    across_ranks="mean",
)

ACTIVATIONS = TensorProbe(
    "activations",
    Tap.INPUT,
    (DEAD_FRACTION, ACTIVE_FRACTION, SAMPLES, UNITS),
    every=_EVERY,
    chooses=lambda module: _is_rectifier(module) or _is_consumer(module),
    views=_rectified,
    seeks=_is_rectifier,
    computed_only=True,
    worth=lambda values: values["active_fraction"] < 1,
)
SATURATION = TensorProbe(
    "saturation",
    Tap.INPUT,
    (SATURATED_FRACTION,),
    every=_EVERY,
    chooses=_is_bounded,
    views=_margins,
    seeks=_is_bounded,
    computed_only=True,
    worth=lambda values: ~np.isnan(values["saturated_fraction"]),
)
