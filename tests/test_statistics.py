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
        return (
            f"Sample({self.kind}, {x.dtype}, {tuple(x.shape)}, stride {x.stride()}, split {self.split}, {x.tolist()})"
        )


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
        return {
            "mean": mean,
            "variance": math.nan,
            "rms": size,
            "norm": size,
            "max_abs": size,
            "kurtosis": math.nan,
            **count,
        }
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
    if tap is Tap.GATE:  # weights and slopes, [entry, 2]
        weights = (x.real if x.is_complex() else x).double().sum((1, 2))
        return (torch.stack([weights, weights.abs()], 1),)
    several = {Tap.UPDATE: 2, Tap.INPUT_AND_GRADIENT: 2, Tap.RESIDUAL_SUM: 3, Tap.RESIDUAL_GRADIENTS: 6}
    return tuple(x.flip(1) if i % 2 else x for i in range(several.get(tap, 1)))


def viewed(name: str, tap: Tap, x: Tensor) -> tuple[Tensor, ...] | None:
    """What the probe makes of it at a module it fits."""
    owners = (nn.Linear(5, 5), nn.LayerNorm(max(x.shape[-1], 1), dtype=x.real.dtype))
    owner = next((owner for owner in owners if available[name].fits(owner)), None)
    return None if owner is None else available[name].view(observation(tap, x), owner)


available = available_probes()


def size_of(x: Tensor) -> float:
    """Largest finite magnitude."""
    return max((abs(v) for v in entries(x) if math.isfinite(v)), default=0.0)


def assert_same_terms(terms: Terms, actual: np.ndarray, wanted: np.ndarray, x: Tensor) -> None:
    """Equal up to rounding: each column relative to itself, and to the size of the entries to the column's degree."""
    for i, name in enumerate(terms.columns):
        degree = terms.degrees[i] if terms.degrees else 0
        slack = 1e-13 * max(x.numel(), 1) * size_of(x) ** degree
        np.testing.assert_allclose(
            actual[..., i], wanted[..., i], rtol=1e-10, atol=slack, err_msg=f"{terms.name}.{name}"
        )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(sample=samples())
def test_merge_law(sample):
    """of(a ++ b) == merge(of(a), of(b)) for every registered statistic, joined along the first axis."""
    x = sample.tensor
    known: dict[tuple[str, Terms], tuple[np.ndarray, np.ndarray] | None] = {}
    for group, tap, statistic in REGISTERED:
        if not statistic.mergeable:
            continue
        key = (group, statistic.terms)
        if key not in known:
            known[key] = both_ways(group, tap, statistic.terms, sample)
        if known[key] is not None:
            merged, whole = known[key]
            slack = 1e-12 * size_of(x) ** (2 if statistic.name == "variance" else 1)
            np.testing.assert_allclose(
                statistic.of(merged), statistic.of(whole), rtol=1e-8, atol=slack, err_msg=statistic.name
            )
    assert any(found is not None for found in known.values()), "no statistic was checked"


def both_ways(group: str, tap: Tap, terms: Terms, sample: Sample) -> tuple[np.ndarray, np.ndarray] | None:
    """Terms of two parts merged, and terms of the whole; None where the probe has nothing to say."""
    x = sample.tensor
    view = viewed(group, tap, x)
    if view is None or len({len(tensor) for tensor in view}) > 1:
        return None
    split = min(sample.split, len(view[0]))
    parts = view, tuple(t[:split] for t in view), tuple(t[split:] for t in view)
    with torch.no_grad():
        whole, a, b = (terms.of(*part).numpy() for part in parts)
    merged = terms.merge(a, b)
    if sample.kind != "constant":  # there the higher sums are rounding errors, which finish() leaves out
        assert_same_terms(terms, merged, whole, x)
        assert_same_terms(terms, terms.merge(b, a), merged, x)
    return merged, whole


@settings(max_examples=80, deadline=None, derandomize=True)
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


def test_blocks_do_not_change_the_result(monkeypatch):
    """A tensor read in many pieces has the terms of one read in a single piece."""
    x = torch.randn(7, 11, 13, generator=torch.Generator().manual_seed(0)) + 100
    whole = MOMENTS.of(x), SQUARES.of(x)
    monkeypatch.setattr("keelscope.entries._CACHED_BLOCK", 64)
    for terms, wanted in zip((MOMENTS, SQUARES), whole, strict=True):
        torch.testing.assert_close(terms.of(x), wanted, rtol=1e-13, atol=0)


@pytest.mark.parametrize("terms", [MOMENTS, SQUARES, POWERS], ids=lambda terms: terms.name)
def test_degrees(terms):
    """of(s * x)[i] == s**degrees[i] * of(x)[i], which takes a loss scale out of gradients."""
    x = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scaled = terms.rescaled(terms.of(65536 * x).numpy(), 1 / 65536)
    np.testing.assert_allclose(scaled, terms.of(x).numpy(), rtol=1e-10)


def test_rescaling_every_gradient_statistic():
    """What a probe of gradients says does not depend on the loss scale, whichever terms it is made of."""
    x = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[1, 4] = 0.0
    taps = {Tap.OUTPUT_GRADIENT, Tap.PARAMETER_GRADIENT}
    checked = [(group, statistic) for group, tap, statistic in REGISTERED if tap in taps]
    assert len(checked) >= 8
    for group, statistic in checked:
        terms = statistic.terms
        view, scaled = (available[group].view((t,), nn.Linear(5, 5)) for t in (x, 65536 * x))
        unscaled = statistic.of(terms.rescaled(terms.of(*scaled).numpy(), 1 / 65536))
        np.testing.assert_allclose(unscaled, statistic.of(terms.of(*view).numpy()), rtol=1e-10, err_msg=statistic.name)


class TestTraps:
    """Where torch's own reductions give a wrong number, or none."""

    def test_half_precision_sums_overflow(self):
        x = torch.full((256, 256), 300.0, dtype=torch.float16)
        assert torch.linalg.vector_norm(x) == math.inf
        assert NORM.value(x) == 300 * 256
        assert VARIANCE.value(x) == 0
        x[::2] = -300
        assert x.pow(2).mean() == math.inf
        np.testing.assert_allclose(VARIANCE.value(x), expected(x)["variance"], rtol=1e-12)

    def test_bfloat16_sums_round(self):
        x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).mul(3).add(1).bfloat16()
        exact = x.double().norm().item()
        assert abs(x.norm().item() / exact - 1) > 1e-4
        assert NORM.value(x) == pytest.approx(exact, rel=1e-12)
        assert MEAN.value(x) == pytest.approx(x.double().mean().item(), rel=1e-12)

    def test_bfloat16_share_rounds(self):
        x = torch.zeros(1024, dtype=torch.bfloat16)
        x[0] = 1
        assert (x == 0).bfloat16().mean() == 1
        assert ZERO_FRACTION.value(x) == 1023 / 1024

    @pytest.mark.parametrize(("size", "wrong"), [(1e-25, 0.0), (1e25, math.inf)])
    def test_float32_squares_leave_the_range(self, size, wrong):
        x = torch.full((16, 16), size)
        assert torch.linalg.vector_norm(x) == wrong
        exact = 16 * x[0, 0].double().item()
        for statistic in (NORM, available["parameters"].statistics[0]):
            assert statistic.value(x) == pytest.approx(exact, rel=1e-12)
        assert RMS.value(x) == pytest.approx(exact / 16, rel=1e-12)

    def test_long_float32_sums_lose_digits(self):
        x = torch.full((1 << 22,), 0.1)
        exact = math.sqrt(1 << 22) * x[0].double().item()
        assert NORM.value(x) == pytest.approx(exact, rel=1e-12)
        assert MEAN.value(x) == pytest.approx(x[0].double().item(), rel=1e-13)

    def test_square_of_means_cancels(self):
        x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) + 1e4
        naive = x.square().mean() - x.mean() ** 2
        exact = x.double().var(correction=0).item()
        assert abs(naive.item() / exact - 1) > 0.1
        assert VARIANCE.value(x) == pytest.approx(exact, rel=1e-10)

    def test_large_mean_in_float64(self):
        x = torch.randn(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1e6
        assert VARIANCE.value(x) == pytest.approx(expected(x)["variance"], rel=1e-9)

    def test_outlier_first(self):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
        x[0] = 1e20
        want = expected(x)
        for statistic in (NORM, VARIANCE, MAX_ABS, KURTOSIS):
            assert statistic.value(x) == pytest.approx(want[statistic.name], rel=1e-10)

    def test_empty(self):
        with pytest.raises(RuntimeError):
            torch.empty(0).aminmax()
        for shape in [(0,), (0, 4, 4), (3, 0)]:
            assert all(math.isnan(statistic.value(torch.empty(shape))) for statistic in BUILT_IN)
            assert MOMENTS.of(torch.empty(shape)).tolist() == [0] * 6

    def test_one_entry(self):
        x = torch.tensor(2.0)
        assert [s.value(x) for s in (MEAN, VARIANCE, RMS, NORM, MAX_ABS)] == [2, 0, 2, 2, 2]
        assert math.isnan(KURTOSIS.value(x))

    def test_complex_entries_count_as_two_reals(self):
        x = torch.tensor([3 + 4j, 0j])
        assert NORM.value(x) == 5
        assert SQUARES.of(x).tolist() == [4, 25]
        assert ZERO_FRACTION.value(x) == 0.5
        assert NORM.value(x.conj()) == NORM.value(x.conj().imag) + 1 == 5

    def test_negated_view(self):
        assert MEAN.value(torch.tensor([1 + 2j]).conj().imag) == -2

    def test_float8(self):
        x = torch.tensor([1.0, -2.0, 0.0]).to(torch.float8_e4m3fn)
        assert MAX_ABS.value(x) == 2
        assert NORM.value(x) == math.sqrt(5)

    def test_infinities_and_nan_stay_apart(self):
        infinite, undefined = torch.tensor([1.0, -math.inf]), torch.tensor([1.0, math.nan, math.inf])
        assert [s.value(infinite) for s in (MEAN, NORM, MAX_ABS, NONFINITE_COUNT)] == [-math.inf, math.inf, math.inf, 1]
        assert NONFINITE_COUNT.value(undefined) == 2
        assert math.isnan(MAX_ABS.value(undefined))
        assert math.isnan(NORM.value(undefined))

    def test_finite_entries_whose_sum_overflows_are_no_alarm(self):
        assert NONFINITE_COUNT.value(torch.full((8,), 1e308, dtype=torch.float64)) == 0

    def test_permuted_tensor_is_not_copied(self):
        x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
        assert NORM.value(x.permute(2, 0, 1)) == pytest.approx(NORM.value(x), rel=1e-14)

    def test_the_tensor_is_not_changed(self):
        for dtype in EXPONENTS:
            x = (
                torch.randn(3, 4, 5, dtype=torch.complex64).to(dtype)
                if dtype.is_complex
                else torch.randn(3, 4, 5).to(dtype)
            )
            before, version = x.clone(), x._version
            for group, tap, statistic in REGISTERED:
                with torch.no_grad():
                    view = viewed(group, tap, x)
                    if view is not None:
                        statistic.terms.of(*view)
            assert torch.equal(x, before)
            assert x._version == version


class TestLayouts:
    """Sparse and nested tensors against their dense entries."""

    def assert_equal(self, x: Tensor, dense: Tensor) -> None:
        for statistic in BUILT_IN:
            np.testing.assert_allclose(statistic.value(x), statistic.value(dense), rtol=1e-12, err_msg=statistic.name)
        np.testing.assert_allclose(SQUARES.of(x), SQUARES.of(dense), rtol=1e-12)

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_sparse_with_duplicates(self):
        x = torch.sparse_coo_tensor([[1, 1, 3]], [[1.0, 2.0], [3.0, -2.0], [5.0, 6.0]], (6, 2))
        assert NORM.value(x) != pytest.approx(x._values().norm().item(), rel=1e-3), (
            "duplicates add up before they are squared"
        )
        self.assert_equal(x, x.to_dense())

    @pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR) tensor support is in beta")
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    @pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
    def test_sparse_layouts(self, layout, dtype):
        dense = torch.randn(6, 4, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 3
        dense[::2] = 0
        self.assert_equal(getattr(dense, layout)(), dense)

    def test_sparse_without_entries(self):
        self.assert_equal(torch.zeros(3, 4).to_sparse(), torch.zeros(3, 4))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
    @pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
    def test_nested(self, layout):
        parts = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in (3, 1, 5)]
        self.assert_equal(torch.nested.nested_tensor(parts, layout=layout), torch.cat(parts))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
    def test_nested_without_components(self):
        assert math.isnan(NORM.value(torch.nested.nested_tensor([])))


def test_late_tokens():
    """Mean log10 of the norms of the later half of positions; exact zeros apart."""
    gradient = torch.zeros(2, 5, 3)
    gradient[0, 2, 0], gradient[1, 3, 1], gradient[1, 4] = 1e-3, 10.0, torch.tensor([3.0, 4.0, 0.0])
    gradient[:, :2] = 1e9  # the first half does not count
    level, zeros = (s for s in available["gradients"].statistics if s.name.startswith("late"))
    assert level.value(gradient) == pytest.approx((-3 + 1 + math.log10(5)) / 3, rel=1e-7)
    assert zeros.value(gradient) == 0.5
    for other in (gradient[0], gradient[None], gradient.to(torch.complex64), gradient[:, :0], gradient.to_sparse()):
        assert math.isnan(level.value(other))
        assert math.isnan(zeros.value(other))
    assert math.isnan(level.value(torch.zeros(2, 4, 3)))
    assert zeros.value(torch.zeros(2, 4, 3)) == 1


def test_kurtosis_of_a_normal_sample():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    assert KURTOSIS.value(x) == pytest.approx(3, abs=0.05)
    assert KURTOSIS.value(torch.tensor([-1.0, 1.0])) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kurtosis_of_a_constant_is_not_rounding_noise(dtype):
    assert math.isnan(KURTOSIS.value(torch.full((1001,), 0.1, dtype=dtype)))


def test_merging_many_parts_in_any_grouping():
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + 1000
    for terms in (MOMENTS, POWERS, SQUARES):
        parts = [terms.of(row).numpy() for row in x]
        left = parts[0]
        for part in parts[1:]:
            left = terms.merge(left, part)
        tree = np.stack(parts)
        while len(tree) > 1:
            tree = terms.merge(tree[::2], tree[1::2])
        assert_same_terms(terms, left, terms.of(x).numpy(), x)
        assert_same_terms(terms, tree[0], left, x)


def test_many_at_once():
    """The batched kernel of terms, where there is one, gives what they give one by one."""
    tensors = [
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        for shape in [(3, 4), (5,), (0,), (), (2, 3, 4)]
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    ]
    tensors += [torch.full((4,), 1e-25), torch.full((4,), 1e25), torch.full((4, 4), 300.0, dtype=torch.float16)]
    tensors += [torch.tensor([math.inf, 1.0]), torch.tensor([math.nan]), torch.randn(4, 6).T, torch.eye(3).to_sparse()]
    pairs = [torch.randn(entries, 2, generator=torch.Generator().manual_seed(0)) for entries in (1, 5, 0, 5, 2)]
    pairs += [torch.tensor([[math.inf, math.nan], [1.0, 0.0]])]
    batched = {statistic.terms: tap for _, tap, statistic in REGISTERED if statistic.terms.of_many is not None}
    assert SQUARES in batched
    for terms, tap in batched.items():
        several = pairs if tap is Tap.GATE else tensors
        single = torch.stack([terms.of(x) for x in several])
        torch.testing.assert_close(terms.of_many(several), single, rtol=1e-12, atol=0, equal_nan=True)


def test_value_of_a_parameter():
    assert NORM.value(nn.Parameter(torch.tensor([3.0, 4.0]))) == 5


def test_additive_is_one_declaration():
    positive = additive("positive", ("n", "hits"), lambda x: torch.stack([(x == x).sum(), (x > 0).sum()]).double())
    share = Statistic("positive_share", positive, lambda t: t["hits"] / t["n"], "1", "Share of entries above 0.")
    a, b = torch.tensor([1.0, -1.0]), torch.tensor([2.0, 3.0])
    merged = positive.merge(positive.of(a).numpy(), positive.of(b).numpy())
    assert share.of(merged) == share.value(torch.cat([a, b])) == 0.75


def test_public_statistics_are_sound():
    """Names are distinct, and every one says what it is."""
    public = [getattr(statistics, name) for name in statistics.__all__]
    declared = [value for value in public if isinstance(value, Statistic)]
    assert len({s.name for s in declared}) == len(declared) == 8
    assert all(s.doc.endswith(".") and s.unit for s in declared)
