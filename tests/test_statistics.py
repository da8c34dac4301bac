"""The merge law and the values of every registered statistic, against slow references, for every dtype and layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keelscope import statistics
from keelscope.probe import Tap, available_probes
from keelscope.statistics import (
    KURTOSIS,
    MAX_ABS,
    MEAN,
    MOMENTS,
    NONFINITE_COUNT,
    NORM,
    POWERS,
    RMS,
    SQUARES,
    VARIANCE,
    ZERO_FRACTION,
    Statistic,
    Terms,
    additive,
)

EXPONENTS = {
    torch.float16: (-6, 0, 3),
    torch.bfloat16: (-25, 0, 25),
    torch.float32: (-25, 0, 25),
    torch.float64: (-100, 0, 100),
    torch.complex64: (-25, 0, 25),
}
KINDS = ("normal", "offset", "relu", "zeros", "constant", "outlier", "nonfinite")
LAYOUTS = ("contiguous", "permuted", "strided", "expanded")
BUILT_IN = (MEAN, VARIANCE, RMS, NORM, MAX_ABS, ZERO_FRACTION, NONFINITE_COUNT, KURTOSIS)


@dataclass(frozen=True)
class Sample:
    """A tensor [batch, position, feature] and how it came about."""

    tensor: Tensor
    kind: str
    split: int

    def __repr__(self) -> str:
        x = self.tensor
        return f"Sample({self.kind}, {x.dtype}, {tuple(x.shape)}, stride {x.stride()}, split {self.split}, {x.tolist()})"


@st.composite
def samples(draw) -> Sample:
    dtype = draw(st.sampled_from(sorted(EXPONENTS, key=str)))
    kind = draw(st.sampled_from(KINDS))
    shape = (draw(st.integers(0, 6)), draw(st.integers(0, 5)), draw(st.integers(0, 5)))
    exponent = draw(st.sampled_from(EXPONENTS[dtype]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    tensor = filled(kind, shape, dtype, exponent, generator)
    return Sample(laid_out(draw(st.sampled_from(LAYOUTS)), tensor), kind, draw(st.integers(0, shape[0])))


def filled(kind: str, shape: tuple[int, ...], dtype: torch.dtype, exponent: int, generator: torch.Generator) -> Tensor:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    x = torch.randn(shape, dtype=wide, generator=generator)
    if kind == "offset":
        x = x * 0.1 + 1
    elif kind == "relu":
        x = x * (x.real > 0)
    elif kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "constant":
        x = torch.full_like(x, -0.7)
    elif kind == "outlier" and x.numel():
        x.view(-1)[0] = 30.0
    x = (x * 10.0**exponent).to(dtype)
    if kind == "nonfinite" and x.numel():
        at = torch.randint(0, x.numel(), (3,), generator=generator)
        bad = torch.tensor([math.inf, -math.inf, math.nan])[torch.randint(0, 3, (3,), generator=generator)]
        x.view(-1)[at] = bad.to(dtype)
    return x


def laid_out(layout: str, x: Tensor) -> Tensor:
    if layout == "permuted":
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if layout == "strided":
        return torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., ::2]
    if layout == "expanded":
        return x[:, :, :1].expand(-1, -1, max(x.shape[2], 1)) if x.shape[2] else x
    return x


def entries(x: Tensor) -> list[float]:
    """Every entry as a Python float; a complex one is two."""
    if x.is_complex():
        return [part for z in x.reshape(-1).tolist() for part in (z.real, z.imag)]
    return x.double().reshape(-1).tolist()


def expected(x: Tensor) -> dict[str, float]:
    """Each statistic from its definition, by exactly rounded sums."""
    values = entries(x)
    n = len(values)
    if n == 0:
        return dict.fromkeys((s.name for s in BUILT_IN), math.nan)
    count = {
        "zero_fraction": sum(v == 0 for v in values) / n,
        "nonfinite_count": sum(not math.isfinite(v) for v in values),
    }
    if not all(map(math.isfinite, values)):
        nan = any(map(math.isnan, values))
        mean = math.nan if nan or len({v for v in values if math.isinf(v)}) == 2 else max(values, key=abs)
        size = math.nan if nan else math.inf
        return {"mean": mean, "variance": math.nan, "rms": size, "norm": size, "max_abs": size, "kurtosis": math.nan, **count}
    top = max(map(abs, values))
    unit = [v / top if top else 0.0 for v in values]  # powers of 1e100 leave the range of a float
    mean = math.fsum(unit) / n
    power = {k: math.fsum((v - mean) ** k for v in unit) for k in (2, 4)}
    squares = math.fsum(v * v for v in unit)
    flat = power[2] <= n * (1e-14 * mean) ** 2
    return {
        "mean": mean * top,
        "variance": power[2] / n * top**2,
        "rms": math.sqrt(squares / n) * top,
        "norm": math.sqrt(squares) * top,
        "max_abs": top,
        "kurtosis": math.nan if flat else n * power[4] / power[2] ** 2,
        **count,
    }


def registered() -> list[tuple[str, Tap, Statistic]]:
    """Every statistic of every installed probe, required and optional."""
    return [
        (probe.name, probe.tap, statistic)
        for probe in available_probes().values()
        for statistic in (*probe.statistics, *probe.optional)
    ]


REGISTERED = registered()


def observation(tap: Tap, x: Tensor) -> tuple[Tensor, ...]:
    """What a probe of this tap is shown."""
    return (x, x.flip(1)) if tap is Tap.UPDATE else (x,)


def viewed(group: str, tap: Tap, x: Tensor) -> tuple[Tensor, ...] | None:
    return available[group].view(observation(tap, x), nn.Linear(5, 5))


available = available_probes()


def size_of(x: Tensor) -> float:
    """Largest finite magnitude."""
    return max((abs(v) for v in entries(x) if math.isfinite(v)), default=0.0)


def assert_same_terms(terms: Terms, actual: np.ndarray, wanted: np.ndarray, x: Tensor) -> None:
    """Equal up to rounding: each column relative to itself, and to the size of the entries to the column's degree."""
    for i, name in enumerate(terms.columns):
        degree = terms.degrees[i] if terms.degrees else 0
        slack = 1e-13 * max(x.numel(), 1) * size_of(x) ** degree
        np.testing.assert_allclose(actual[..., i], wanted[..., i], rtol=1e-10, atol=slack, err_msg=f"{terms.name}.{name}")


@settings(max_examples=400, deadline=None, derandomize=True)
@given(sample=samples())
def test_merge_law(sample):
    """of(a ++ b) == merge(of(a), of(b)) for every registered statistic, joined along the first axis."""
    x = sample.tensor
    checked = set()
    for group, tap, statistic in REGISTERED:
        if not statistic.mergeable:
            continue
        parts = [viewed(group, tap, part) for part in (x, x[: sample.split], x[sample.split :])]
        if any(part is None for part in parts):
            continue
        whole, a, b = (statistic.terms.of(*part).numpy() for part in parts)
        merged = statistic.terms.merge(a, b)
        assert_same_terms(statistic.terms, merged, whole, x)
        assert_same_terms(statistic.terms, statistic.terms.merge(b, a), merged, x)
        if sample.kind not in {"constant", "zeros"}:  # there a ratio of rounding errors may be finished
            slack = 1e-12 * size_of(x) ** (2 if statistic.name == "variance" else 1)
            np.testing.assert_allclose(statistic.of(merged), statistic.of(whole), rtol=1e-8, atol=slack, err_msg=statistic.name)
        checked.add(statistic.terms)
    assert checked, "no statistic was checked"


@settings(max_examples=400, deadline=None, derandomize=True)
@given(sample=samples())
def test_values(sample):
    """Every general statistic against its definition, summed exactly."""
    x = sample.tensor
    want = expected(x)
    for statistic in BUILT_IN:
        slack = 1e-13 * max(1, x.numel()) * size_of(x) ** (2 if statistic is VARIANCE else 1)
        if statistic is KURTOSIS:
            slack = 1e-9
        got = statistic.value(x)
        np.testing.assert_allclose(got, want[statistic.name], rtol=1e-10, atol=slack, err_msg=statistic.name)


