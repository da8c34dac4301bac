"""Reading a norm's gain, shift and epsilon off its outputs, for classes that are not torch's own.

A `standin.StandIn` is called on a handful of rows. The odd part of its output, ``(f(x) - f(-x)) / 2 =
gamma c / s``, gives gamma where rows are long and epsilon where they are next to nothing; two draws of the parameters
tell how gamma follows from them (``factor * weight + offset``). `recognition` asks once per kind of module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from keelscope.jacobian.norms import Floor, Layout, Unit
from keelscope.jacobian.readers import Affine, FittedReader
from keelscope.jacobian.standin import Setting, StandIn

__all__ = ["fit"]

_LARGE, _SMALL, _TINY = 1e3, 1e-2, 1e-17
_CLOSE = 1e-4
"""Relative tolerance: many classes compute in float32 whatever they are given."""
_NICE = 1e-5
_FREE_WIDTHS = (8, 12)
_WIDEST = 1 << 16
_FLOORS: dict[Floor, tuple[float, float]] = {"root": (2**0.5, 10**0.5), "sum": (2, 4), "max": (1, 3)}
"""s over its smallest value, where sqrt(m) is once and three times that value."""


def fit(module: nn.Module, setting: Setting) -> FittedReader | None:
    """Find out how a module normalises, by trying its class out.

    Args:
        module: a simple module (`keelscope.jacobian.standin.is_simple`); it is not called.
        setting: where and in which type to try it.

    Returns:
        Where the form is found in such modules, None if they compute something else. Only the rows tried are checked.
    """
    lengths = _lengths(module)
    if lengths is None:
        return None
    if not lengths:
        free = _free(*(_fit_width(module, width, setting) for width in _FREE_WIDTHS))
        if free is not None:
            return free
    for width in lengths or _declared_widths(module):
        found = _fit_width(module, width, setting)
        if found is not None:
            return _in_best_unit(found)
    return None


def _lengths(module: nn.Module) -> set[int] | None:
    """The length of the vectors that a module owns, empty where it has none; None if it cannot be a norm."""
    shapes = [tuple(p.shape) for p in module.parameters(recurse=False)]
    lengths = {math.prod(shape) for shape in shapes} - {1}
    if len(lengths) > 1 or any(math.prod(shape) != max(shape, default=1) for shape in shapes):
        return None
    named = "norm" in type(module).__name__.lower() or any("eps" in name for name in vars(module))
    return lengths if shapes or named else None


def _declared_widths(module: nn.Module) -> list[int]:
    """Numbers among a module's settings that may be the length of a row."""
    values = [value for name, value in vars(module).items() if not name.startswith("_")]
    numbers = [v[0] if isinstance(v, tuple | list) and len(v) == 1 else v for v in values]
    return [v for v in numbers if type(v) is int and 1 < v <= _WIDEST]


def _free(one: FittedReader | None, other: FittedReader | None) -> FittedReader | None:
    """The reader for rows of any length, from those found for two lengths."""
    if one is None or other is None or one.layout != "last":
        return None
    units: tuple[Unit, ...] = ("rms", "length")
    for unit in units:
        first, second = _in_unit(one, unit), _in_unit(other, unit)
        if _alike(first, second):
            return replace(first, width=0)
    return None


def _alike(one: FittedReader, other: FittedReader) -> bool:
    """Equal but for the width, up to rounding of what was measured."""
    numbers = [(r.gamma.factor, r.gamma.offset, -1.0 if r.eps is None else r.eps) for r in (one, other)]
    same = all(math.isclose(a, b, rel_tol=_NICE) for a, b in zip(*numbers, strict=True))
    plain = Affine()
    return same and replace(one, width=0, eps=0, gamma=plain) == replace(other, width=0, eps=0, gamma=plain)


def _fit_width(module: nn.Module, width: int, setting: Setting) -> FittedReader | None:
    for arrangement in (_Arrangement("last"), _Arrangement("channel", (3, 2)), _Arrangement("channel", (2,))):
        trial = _Trial(module, width, arrangement, setting)
        found = trial.row_norm() or trial.saturating()
        if found is not None:
            return found
    return None


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """How six rows lie in the input of a module."""

    layout: Layout
    places: tuple[int, ...] = (2,)

    def call(self, module: StandIn, rows: Tensor) -> Tensor | None:
        """Output rows of a module for input rows, both ``[6, width]``."""
        x = rows.reshape(-1, *self.places, rows.shape[1])
        if self.layout == "last":
            y = module(x)
            return None if y is None else y.reshape(rows.shape)
        y = module(x.movedim(-1, 1).contiguous())
        return None if y is None else y.movedim(1, -1).reshape(rows.shape)


def _rows(width: int) -> Tensor:
    """Six rows of different size and direction, none centred, ``[6, width]``."""
    draw = torch.Generator().manual_seed(width)
    rows = torch.randn(6, width, generator=draw, dtype=torch.float64, device="cpu") + 0.5
    return rows * torch.arange(1, 7, device="cpu")[:, None]


def _units(rows: Tensor, *, centred: bool) -> Tensor:
    """Rows of mean square 1 (after centring)."""
    c = rows - rows.mean(1, keepdim=True) if centred else rows
    return c / c.square().mean(1, keepdim=True).sqrt()


def _near(a: Tensor, b: Tensor, size: Tensor) -> bool:
    return bool(((a - b).abs().max() <= _CLOSE * size).item())


@dataclass(frozen=True, slots=True)
class _Trial:
    """The attempts to see a norm in one module, for rows of one width."""

    module: nn.Module
    width: int
    arrangement: _Arrangement
    setting: Setting

    def row_norm(self) -> FittedReader | None:
        """Reader of ``gamma c / s + beta``, or None."""
        twins = self._twin(1), self._twin(2)
        one, two = (self._response(twin) for twin in twins)
        if one is None or two is None:
            return None
        gamma, beta = self._parameters(twins, (one[1], two[1]), (one[2], two[2]))
        if gamma is None or beta is None:
            return None
        reader = FittedReader("layer" if one[0] else "rms", self.arrangement.layout, self.width, gamma, beta)
        smallest = self._scale(reader, _TINY)
        return None if smallest is None else self._floored(reader, smallest)

    def _twin(self, seed: int) -> StandIn:
        return StandIn(self.module, seed, self.setting)

    def _response(self, twin: StandIn) -> tuple[bool, Tensor, Tensor] | None:
        """Centred or not, gamma and beta ``[width]``, from rows so long that epsilon does not matter."""
        rows = _LARGE * _rows(self.width)
        parts = self._odd_and_even(twin, rows)
        if parts is None:
            return None
        odd, even = parts
        for centred in (False, True):
            unit = _units(rows, centred=centred)
            gain = (odd * unit).sum(0) / unit.square().sum(0)
            if _near(odd, gain * unit, odd.abs().max()):
                return centred, gain, even
        return None

    def _odd_and_even(self, twin: StandIn, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """The odd part of the response ``[6, width]``, and the even part ``[width]``, the same for every row."""
        up, down = self.arrangement.call(twin, rows), self.arrangement.call(twin, -rows)
        if up is None or down is None:
            return None
        odd, even = (up - down) / 2, (up + down) / 2
        return (odd, even.mean(0)) if _near(even, even[:1], odd.abs().max()) else None

    def _parameters(
        self, twins: tuple[StandIn, StandIn], gains: tuple[Tensor, Tensor], shifts: tuple[Tensor, Tensor]
    ) -> tuple[Affine | None, Affine | None]:
        """How gamma and beta follow from the parameters; beta is a parameter or 0."""
        size = gains[0].abs().max()
        beta = _affine(twins, shifts, size)
        plain = beta is not None and beta.offset == 0 and beta.factor in {0.0, 1.0}
        return _affine(twins, gains, size), beta if plain else None

    def _scale(self, reader: FittedReader, size: float, eps: tuple[str, float] | None = None) -> float | None:
        """Scale s of rows with sqrt(m) = size, None if it differs from row to row; `eps` sets an attribute first."""
        twin = self._twin(1)
        if reader.beta.name:
            twin.tensors[reader.beta.name].zero_()
        if eps is not None:
            vars(twin.module)[eps[0]] = eps[1]
        c = size * _units(_rows(self.width), centred=reader.kind == "layer")
        output = self.arrangement.call(twin, c)
        if output is None:
            return None
        gamma = reader.gamma.of(twin.module)
        gained = c * (gamma.reshape(-1).cpu() if isinstance(gamma, Tensor) else gamma)
        scales = gained.square().sum(1) / (gained * output).sum(1)  # [6]
        return scales[0].item() if _near(scales, scales[:1], scales[0].abs()) else None

    def _floored(self, reader: FittedReader, smallest: float) -> FittedReader | None:
        """The reader with what keeps s above 0; `smallest` is s of rows of next to no size."""
        if abs(smallest / _TINY - 1) < _CLOSE:
            return reader
        scales = [self._scale(reader, k * smallest) for k in (1, 3)]
        for floor, factors in _FLOORS.items():
            if all(s is not None and abs(s / (f * smallest) - 1) < 1e-3 for s, f in zip(scales, factors, strict=True)):
                return self._with_epsilon(replace(reader, floor=floor), smallest)
        return None

    def _with_epsilon(self, reader: FittedReader, smallest: float) -> FittedReader:
        """The reader with its epsilon: the attribute whose change s follows, or a constant."""
        power = 2 if reader.floor == "root" else 1
        for name, value in vars(self.module).items():
            if "eps" in name.lower() and isinstance(value, float) and value > 0:
                changed = self._scale(reader, _TINY, (name, 4 * value))
                if changed is not None and abs(changed / (4 ** (1 / power) * smallest) - 1) < 1e-3:
                    return replace(reader, eps=smallest**power / value, eps_name=name)
        if power == 2 and abs(smallest**2 / torch.finfo(self.setting[1]).eps - 1) < 1e-3:
            return replace(reader, eps=None)
        return replace(reader, eps=smallest**power)

    def saturating(self) -> FittedReader | None:
        """Reader of ``gamma tanh(a x) + beta``, or None."""
        twins = self._twin(1), self._twin(2)
        gains, shifts, slopes = [], [], []
        rows = _rows(self.width)
        rows = rows + rows.sign()  # no entry so small that it would not saturate
        for twin in twins:
            far, near = self._odd_and_even(twin, _LARGE * rows), self._odd_and_even(twin, _SMALL * rows)
            if far is None or near is None:
                return None
            gains.append((far[0] * rows.sign()).mean(0))
            shifts.append(far[1])
            slopes.append((torch.atanh(near[0] / gains[-1]) / (_SMALL * rows)).mean(0))
        if not all(slope.isfinite().all() for slope in slopes):
            return None
        gamma, beta = self._parameters(twins, (gains[0], gains[1]), (shifts[0], shifts[1]))
        slope = _affine(twins, (slopes[0], slopes[1]), slopes[0].abs().max())
        if gamma is None or beta is None or slope is None:
            return None
        return FittedReader("dyt", self.arrangement.layout, self.width, gamma, beta, slope)


def _affine(twins: tuple[StandIn, StandIn], values: tuple[Tensor, Tensor], size: Tensor) -> Affine | None:
    """How a vector follows from one parameter, given its value ``[width]`` for two draws of the parameters."""
    one, two = values
    for name in twins[0].tensors:
        p, q = (twin.tensors[name].reshape(-1).to("cpu", torch.float64) for twin in twins)
        if p.numel() not in {1, one.numel()}:
            continue
        step = (p - q).expand_as(one)
        factor = (step * (one - two)).sum() / step.square().sum()
        offset = (one - factor * p).mean()
        follows = _near(one, factor * p + offset, size) and _near(two, factor * q + offset, size)
        if follows and factor.abs() > _CLOSE * size:
            return Affine(name, _snapped(factor, size), _snapped(offset, size))
    mean = one.mean()
    constant = _near(one, mean, size) and _near(two, mean, size)
    return Affine(offset=_snapped(mean, size)) if constant else None


def _snapped(measured: Tensor, size: Tensor) -> float:
    """A measured number as it was meant: 0 next to `size`, a decimal with two digits, or as it is."""
    value = measured.item()
    return 0.0 if abs(value) < _CLOSE * size.item() else _plainest(value, ())


def _plainest(value: float, others: tuple[float, ...]) -> float:
    """A decimal with two digits or one of `others`, if the value is as good as that."""
    nearest = min((float(f"{value:.2g}"), *others), key=lambda candidate: abs(candidate - value))
    return nearest if abs(nearest - value) <= _NICE * abs(nearest) else value


def _in_unit(reader: FittedReader, unit: Unit) -> FittedReader:
    """The reader of a row norm, found in terms of the root mean square, in another unit; numbers as they were meant."""
    gamma, eps, width = reader.gamma, reader.eps, reader.width
    if unit == "length" and reader.kind != "dyt":
        gamma = Affine(gamma.name, gamma.factor * width**0.5, gamma.offset * width**0.5)
        eps = None if eps is None else eps * (width if reader.floor == "root" else width**0.5)
        reader = replace(reader, kind="scale" if reader.kind == "rms" else reader.kind, unit="length")
    others = (width**0.5, 1 - 1 / width, (1 - 1 / width) ** 0.5)
    plain = Affine(gamma.name, _plainest(gamma.factor, others), _plainest(gamma.offset, others))
    return replace(reader, gamma=plain, eps=None if eps is None else _plainest(eps, others))


def _in_best_unit(reader: FittedReader) -> FittedReader:
    """The reader in units of length if that takes the root of the width out of gamma."""
    length = _in_unit(reader, "length")
    return length if 1.0 in {length.gamma.factor, length.gamma.offset} and reader.width > 1 else _in_unit(reader, "rms")
