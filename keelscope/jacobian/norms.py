"""What a normalisation layer computes, as a record: kind, gain, shift, epsilon, and which entries share one scale.

`recognition` finds the form of a module, `closed_forms` has the closed forms of its derivative. Every
form but two is a *row norm*: the input is cut into rows of n entries, and a row x becomes

    y = gamma c / s + beta,    c = x - mean(x) or x,    m = mean(c^2),    s = s(m, eps).

For LayerNorm a row is a token, for GroupNorm a group of channels of one sample, for BatchNorm a channel over the whole
batch. BatchNorm in evaluation and DyT act entry by entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from keelscope.entries import constant

__all__ = [
    "Floor",
    "Kind",
    "Layout",
    "NormForm",
    "Unit",
    "fold",
    "folded_gain",
    "kernel_form",
    "normalise",
    "row_scale",
    "running_scale",
    "unfold",
]

Kind = Literal["layer", "rms", "scale", "group", "instance", "batch", "batch_eval", "dyt"]
Layout = Literal["last", "channel", "groups", "batch"]
"""Where a row lies: the last dimensions, dimension 1 at each place, a group of channels with all their places, or one
channel over all samples and places."""
Floor = Literal["root", "sum", "max"]
"""How epsilon keeps s above 0: ``sqrt(m + eps)``, ``sqrt(m) + eps`` or ``max(sqrt(m), eps)``."""
Unit = Literal["rms", "length"]
"""What a row is divided by: the root of the mean of its squares, or of their sum (then m is the sum)."""

Numbers = Any
"""A tensor, or a numpy array of one on the CPU: an operation on a few numbers costs a third there."""

_CENTRED = frozenset({"layer", "group", "instance", "batch"})
_FLOORS = ("root", "sum", "max")
_ENTRYWISE = frozenset({"batch_eval", "dyt"})


@dataclass(frozen=True, slots=True, eq=False)
class NormForm:
    """One norm at one moment; its tensors are the module's own, detached."""

    kind: Kind
    gamma: Tensor | float = 1.0
    """Gain, ``[width]`` or a single number. Factors such as sqrt(d) or 1 + weight are in it."""
    beta: Tensor | float = 0.0
    """Shift, ``[width]`` or a single number."""
    eps: float | None = 0.0
    """None: the machine epsilon of the input's type, float32 for narrower ones (torch's RMSNorm without eps)."""
    shape: tuple[int, ...] = ()
    """Last dimensions that make up a row (empty: the last one, of any length), or the number of channels."""
    layout: Layout = "last"
    floor: Floor = "root"
    unit: Unit = "rms"
    groups: int = 1
    dimensions: int = 0
    """Dimensions of a batched input where the norm takes unbatched ones too; 0 for any number."""
    mean: Tensor | None = None
    """Running mean ``[channel]``, for ``batch_eval``."""
    variance: Tensor | None = None
    """Running variance ``[channel]``, for ``batch_eval``."""
    slope: Tensor | float = 1.0
    """a of ``gamma tanh(a x) + beta``, for ``dyt``."""

    @property
    def width(self) -> int:
        """Number of gains a vector of them has."""
        return math.prod(self.shape)

    @property
    def centred(self) -> bool:
        """Whether the mean of a row is taken away."""
        return self.kind in _CENTRED

    @property
    def entrywise(self) -> bool:
        """Whether each entry goes its own way, so that the Jacobian is diagonal."""
        return self.kind in _ENTRYWISE

    def epsilon(self, dtype: torch.dtype) -> float:
        """Epsilon for an input of this type."""
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps

    def accepts(self, x: Tensor) -> bool:
        """Whether the norm can be applied to a tensor of this shape."""
        if x.layout is not torch.strided or not x.is_floating_point() or x.numel() == 0 or x.is_nested:
            return False
        if self.layout == "last":
            return x.dim() >= max(1, len(self.shape)) and tuple(x.shape[x.dim() - len(self.shape) :]) == self.shape
        return x.dim() >= max(2, self.dimensions) and tuple(x.shape[1:2]) == self.shape


def fold(form: NormForm, x: Tensor) -> Tensor:
    """Cut an input into rows.

    Args:
        form: how rows lie; a row of an entry-wise norm is a token or, for BatchNorm in evaluation, a channel.
        x: an input that the form accepts.

    Returns:
        ``[row, entry]``, a view where strides allow it. Rows go through the places of the input in order, and inside
        one of them through the groups; entries through channels and then places.

    Example:
        >>> fold(NormForm("group", shape=(6,), layout="groups", groups=2), torch.zeros(5, 6, 7)).shape
        torch.Size([10, 21])
    """
    if form.layout == "last":
        return x.reshape(-1, math.prod(form.shape or x.shape[-1:]))
    if form.layout == "channel":
        return x.movedim(1, -1).reshape(-1, form.shape[0])
    if form.layout == "groups":
        return x.reshape(x.shape[0] * form.groups, -1)
    return x.transpose(0, 1).reshape(form.shape[0], -1)


def kernel_form(form: NormForm, x: Tensor) -> tuple[Tensor | float, int, float, bool, int, bool] | None:
    """A form as `keelscope.kernel.norm_gains` takes it.

    Args:
        form: any form.
        x: an input that it accepts.

    Returns:
        Gamma, entries of a row, epsilon, whether rows are centred, how epsilon keeps s above 0, whether m is a sum;
        None for norms over anything but the last dimensions, and those that act entry by entry.
    """
    if form.layout != "last" or form.entrywise:
        return None
    width = form.width if form.shape else x.shape[-1]
    gamma = form.gamma.detach() if isinstance(form.gamma, Tensor) else float(form.gamma)
    return gamma, width, form.epsilon(x.dtype), form.centred, _FLOORS.index(form.floor), form.unit == "length"


def unfold(form: NormForm, rows: Tensor, like: Tensor) -> Tensor:
    """Put rows ``[row, entry]`` back where `fold` took them from in a tensor like `like`."""
    shape = like.shape
    if form.layout == "channel":
        return rows.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    if form.layout == "batch":
        return rows.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return rows.reshape(shape)


def folded_gain(form: NormForm, values: Tensor | float, like: Tensor) -> Tensor:
    """A gain, shift or slope in float64 as it lies over rows.

    Args:
        form: how rows lie.
        values: ``[width]`` or a single number.
        like: any tensor on the device of the rows.

    Returns:
        ``[repeat, width]``: row r has the gains ``[r % repeat]``, each for as many entries as there are places; a
        single number is ``[1, 1]``.
    """
    if not isinstance(values, Tensor):
        return constant(values, like.device).reshape(1, 1)
    wide = values.detach().to(torch.float64)
    if wide.numel() == 1:
        return wide.reshape(1, 1)
    repeat = {"last": 1, "channel": 1, "groups": form.groups, "batch": wide.numel()}[form.layout]
    return wide.reshape(repeat, -1)


def times(rows: Tensor, gain: Tensor) -> Tensor:
    """Rows ``[row, entry]`` multiplied by a folded gain ``[repeat, width]``."""
    repeat, width = gain.shape
    if repeat == 1 and width in {1, rows.shape[1]}:
        return rows * gain
    return (rows.reshape(-1, repeat, width, rows.shape[1] // width) * gain[..., None]).reshape(rows.shape)


def row_scale(form: NormForm, mean_square: Numbers, size: int, dtype: torch.dtype) -> tuple[Numbers, Numbers]:
    """Scale of each row, and how much of a radial change epsilon lets through.

    Args:
        form: a row norm.
        mean_square: of the (centred) rows, any shape; a tensor or an array.
        size: entries in a row.
        dtype: type of the input the rows come from.

    Returns:
        1/s, and 1 - rho with rho = d log s / d log sqrt(m): ``eps / (m + eps)`` for ``sqrt(m + eps)``. Both like
        `mean_square`.

    Example:
        >>> row_scale(NormForm("rms", eps=1.0), torch.tensor([3.0]), 8, torch.float32)
        (tensor([0.5000]), tensor([0.2500]))
    """
    eps = form.epsilon(dtype)
    m = mean_square if form.unit == "rms" else mean_square * size
    if form.floor == "root":
        inverse = 1 / (m + eps)
        return inverse**0.5, eps * inverse
    root = m**0.5
    if form.floor == "sum":
        return 1 / (root + eps), eps / (root + eps)
    return 1 / root.clip(eps), (root < eps) * 1.0


def running_scale(form: NormForm, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What BatchNorm in evaluation does to each channel.

    Args:
        form: of kind ``batch_eval``.
        dtype: type of the input.

    Returns:
        Running mean, ``1 / sqrt(variance + eps)`` and ``eps / (variance + eps)``, each ``[channel]`` in float64.
    """
    assert form.mean is not None
    assert form.variance is not None
    shifted = form.variance.to(torch.float64) + form.epsilon(dtype)
    return form.mean.to(torch.float64), shifted.rsqrt(), form.epsilon(dtype) / shifted


def normalise(form: NormForm, x: Tensor) -> Tensor:
    """The norm itself, in float64: what a module of this form puts out.

    Args:
        form: the norm.
        x: an input that it accepts.

    Returns:
        Float64, like `x`.

    Example:
        >>> normalise(NormForm("layer", shape=(2,)), torch.tensor([[1.0, 5.0]])).tolist()
        [[-1.0, 1.0]]
    """
    rows = fold(form, x).to(torch.float64)  # [row, entry]
    if form.kind == "dyt":
        unit = torch.tanh(times(rows, folded_gain(form, form.slope, x)))
    elif form.kind == "batch_eval":
        mean, scale, _ = running_scale(form, x.dtype)
        unit = (rows - mean[:, None]) * scale[:, None]
    else:
        centred = rows - rows.mean(1, keepdim=True) if form.centred else rows
        unit = centred * row_scale(form, centred.square().mean(1, keepdim=True), rows.shape[1], x.dtype)[0]
    shift = times(torch.ones_like(unit), folded_gain(form, form.beta, x))
    return unfold(form, times(unit, folded_gain(form, form.gamma, x)) + shift, x)
