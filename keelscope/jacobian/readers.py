"""Where a class keeps what a `norms.NormForm` holds: one reader per class of torch, one for fitted classes.

A reader turns a module into its form as it is now, so a form asked for later follows training, an epsilon schedule and
``train()`` or ``eval()``. `recognition` chooses the reader, `fitting` makes those of other classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm

from keelscope.entries import local_shard
from keelscope.jacobian.norms import Floor, Kind, Layout, NormForm, Unit, normalise
from keelscope.jacobian.standin import Setting, StandIn

__all__ = ["TORCH_READERS", "Affine", "FittedReader", "Reader", "agrees", "frozen"]

Reader = Callable[[nn.Module], NormForm]
"""Module -> its form now."""

_CLOSE = 1e-4
"""Relative tolerance: many classes compute in float32 whatever they are given."""
_SIZES = (1.0, 1e-2, 1e-4)
_PLACES = ((3, 2), (2,), (), (2, 2, 2))
"""Dimensions behind the channels that a class may expect."""


def _value(tensor: Tensor | None, otherwise: float) -> Tensor | float:
    """A parameter without gradient, of a distributed one the part on this rank; a number where there is none."""
    return otherwise if tensor is None else local_shard(tensor.detach())


@dataclass(frozen=True, slots=True)
class Affine:
    """``factor * parameter + offset``, or the offset alone where no parameter is named."""

    name: str = ""
    factor: float = 0.0
    offset: float = 0.0

    def of(self, module: nn.Module) -> Tensor | float:
        """The value in a module now."""
        if not self.name:
            return self.offset
        value = local_shard(getattr(module, self.name).detach())
        return value if (self.factor, self.offset) == (1, 0) else self.factor * value.to(torch.float64) + self.offset


@dataclass(frozen=True, slots=True)
class FittedReader:
    """The reader of a class that was tried out."""

    kind: Kind
    layout: Layout
    width: int
    """Features or channels; 0 where any number will do."""
    gamma: Affine
    beta: Affine
    slope: Affine = Affine(offset=1.0)
    floor: Floor = "root"
    unit: Unit = "rms"
    eps: float | None = 0.0
    eps_name: str = ""
    """Attribute that holds epsilon up to the factor `eps`; empty where it is a constant of the code."""

    def __call__(self, module: nn.Module) -> NormForm:
        """The form of a module now."""
        eps = self.eps
        if self.eps_name and eps is not None:
            eps *= float(getattr(module, self.eps_name))
        return NormForm(
            self.kind,
            self.gamma.of(module),
            self.beta.of(module),
            eps,
            (self.width,) if self.width else (),
            self.layout,
            self.floor,
            self.unit,
            slope=self.slope.of(module),
        )


def agrees(module: nn.Module, reader: Reader, setting: Setting) -> bool:
    """Whether modules of this class compute what the reader says, in both modes, at sizes with and without epsilon.

    Args:
        module: the module, which is not called: a stand-in is.
        reader: the reader in question.
        setting: where and in which type to try it.

    Returns:
        True if outputs equal `norms.normalise` to 1e-4, for the first shape of input that the class takes.
    """
    return all(_agrees(StandIn(module, 3, setting, training=training), reader) for training in (False, True))


def _agrees(twin: StandIn, reader: Reader) -> bool:
    form = reader(twin.module)
    draw = torch.Generator().manual_seed(4)
    for shape in _input_shapes(form):
        x = (torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu") + 0.5).to(twin.setting[0])
        got = [twin(size * x) for size in _SIZES] if form.accepts(x) else []
        if got and all(output is not None for output in got):
            wanted = [normalise(form, (size * x).to(twin.setting[1])).cpu() for size in _SIZES]
            return all(a is not None and _near(a, b) for a, b in zip(got, wanted, strict=True))
    return False


def _input_shapes(form: NormForm) -> list[tuple[int, ...]]:
    if form.layout == "last":
        return [(3, 2, *(form.shape or (8,)))]
    return [(4, form.shape[0], *places) for places in _PLACES]


def _near(got: Tensor, want: Tensor) -> bool:
    return bool(((got - want).abs().max() <= _CLOSE * want.abs().max()).item())


def _layer(module: nn.Module) -> NormForm:
    assert isinstance(module, nn.LayerNorm)
    shape = tuple(module.normalized_shape)
    return NormForm("layer", _value(module.weight, 1.0), _value(module.bias, 0.0), module.eps, shape)


def _rms(module: nn.Module) -> NormForm:
    assert isinstance(module, nn.RMSNorm)
    return NormForm("rms", _value(module.weight, 1.0), 0.0, module.eps, tuple(module.normalized_shape))


def _group(module: nn.Module) -> NormForm:
    assert isinstance(module, nn.GroupNorm)
    gamma, beta, shape = _value(module.weight, 1.0), _value(module.bias, 0.0), (module.num_channels,)
    return NormForm("group", gamma, beta, module.eps, shape, "groups", groups=module.num_groups)


def _batch(module: nn.Module) -> NormForm:
    assert isinstance(module, batchnorm._NormBase)
    gamma, beta, shape = _value(module.weight, 1.0), _value(module.bias, 0.0), (module.num_features,)
    if module.training or module.running_var is None:
        return NormForm("batch", gamma, beta, module.eps, shape, "batch")
    mean, variance = module.running_mean, module.running_var
    return NormForm("batch_eval", gamma, beta, module.eps, shape, "batch", mean=mean, variance=variance)


def _instance(module: nn.Module) -> NormForm:
    assert isinstance(module, instancenorm._InstanceNorm)
    if not module.training and module.running_var is not None:
        return _batch(module)
    gamma, beta, width = _value(module.weight, 1.0), _value(module.bias, 0.0), module.num_features
    dimensions = module._get_no_batch_dim() + 1  # type: ignore[no-untyped-call]
    return NormForm("instance", gamma, beta, module.eps, (width,), "groups", groups=width, dimensions=dimensions)


def frozen(module: nn.Module) -> NormForm:
    """The form of a module that keeps everything in buffers under BatchNorm's names, and never updates them."""
    weight, bias, mean, variance = (getattr(module, n) for n in ("weight", "bias", "running_mean", "running_var"))
    eps = float(getattr(module, "eps", 1e-5))
    return NormForm("batch_eval", weight, bias, eps, tuple(variance.shape), "batch", mean=mean, variance=variance)


TORCH_READERS: tuple[tuple[type[nn.Module], Reader], ...] = (
    (nn.LayerNorm, _layer),
    (nn.RMSNorm, _rms),
    (nn.GroupNorm, _group),
    (instancenorm._InstanceNorm, _instance),
    (batchnorm._BatchNorm, _batch),
)
"""Classes of torch, each with the reader of all modules that run its forward."""
