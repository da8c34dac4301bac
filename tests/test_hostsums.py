"""Sums in numpy against the same in Python, entry by entry."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keelscope.hostsums import (
    Moments,
    host_late_tokens,
    host_moments,
    host_moments_and_squares,
    host_squares,
    late_tokens_of,
)
from keelscope.onhost import Place, place_of
from keelscope.rooms import BLOCK, LENGTH, Room

SAMPLES = {
    "one": [3.0],
    "mixed": [1.0, -4.0, 0.0, 2.5, 0.0],
    "far from 0": [1e6 + 1, 1e6 - 1, 1e6],
    "nothing but 0": [0.0, -0.0],
    "tiny": [1e-25, -3e-25],
    "huge": [1e25, 3e25],
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def moments_and_late_tokens(place: Place, shape: tuple[int, ...]) -> tuple[Moments, np.ndarray]:
    moments, squares = host_moments_and_squares(place, Room(), shape[2])
    return moments, late_tokens_of(squares[None], shape)[0]


def check(tensor: torch.Tensor, rounding: float = 1e-15) -> None:
    values = tensor.double().flatten().tolist()
    mean = math.fsum(values) / len(values)
    top = max(map(abs, values))
    found = host_moments(place_of(tensor))
    assert found[[0, 3, 4, 5]].tolist() == [len(values), top, values.count(0.0), 0]
    assert found[1] == pytest.approx(mean, rel=1e-12, abs=1e-15 * top)
    spread = math.fsum((value - mean) ** 2 for value in values)
    assert found[2] == pytest.approx(spread, rel=1e-10, abs=len(values) * (rounding * top) ** 2)
    assert host_squares(place_of(tensor)) == pytest.approx(math.fsum(value**2 for value in values), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", SAMPLES.values(), ids=SAMPLES)
def test_moments_and_squares(values, dtype):
    check(torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [7, LENGTH - 1, LENGTH, LENGTH + 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_of_any_length(count, dtype, mean):
    check((torch.randn(count) + mean).to(dtype))


@given(st.lists(st.sampled_from([math.inf, -math.inf, math.nan, 0.0, 1.0, -2.0]), min_size=1, max_size=9))
def test_what_is_not_finite_is_counted(values):
    tensor = torch.tensor(values)
    found = host_moments(place_of(tensor))
    assert found[5] == sum(not math.isfinite(value) for value in values)
    assert found[4] == values.count(0.0)
    assert found[3] == max(map(abs, values)) or (any(map(math.isnan, values)) and math.isnan(found[3]))
    assert math.isfinite(found[1]) == (found[5] == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 3), (3, 40, 700), (1, 3, LENGTH + 1), (1, 2, BLOCK + 3)])
def test_late_tokens(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    tensor[:, -1] = 0
    norms = [
        math.sqrt(math.fsum(x * x for x in row)) for row in tensor[:, shape[1] // 2 :].double().flatten(0, 1).tolist()
    ]
    above = [norm for norm in norms if norm > 0]
    found = host_late_tokens(place_of(tensor), shape)
    np.testing.assert_allclose(
        found, [math.fsum(map(math.log10, above)), len(above), len(norms) - len(above)], rtol=1e-12
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 3), (4, 64, 128), (3, 40, 700), (1, 9, LENGTH)])
@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_what_is_widened_once_gives_the_same(shape, dtype, mean):
    tensor = (torch.randn(shape) + mean).to(dtype)
    tensor[:, -1] = 0
    place = place_of(tensor)
    moments, late = moments_and_late_tokens(place, shape)
    np.testing.assert_allclose(moments, host_moments(place), rtol=1e-11)
    np.testing.assert_allclose(late, host_late_tokens(place, shape), rtol=1e-12)


@given(
    st.sampled_from([0.0, 1.0, -1e4, 1e-38, 1e30]),
    st.sampled_from([0.0, 1e-3, 1.0, 1e-40, 1e30]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_a_mean_far_from_the_spread(mean, spread, dtype):
    torch.manual_seed(0)
    tensor = (mean + spread * torch.randn(2 * LENGTH + 5, dtype=torch.float64)).to(dtype)
    check(tensor, 4e-15)  # a constant far below 1 is summed with a rounding of its own in each line


@given(st.sampled_from([math.inf, -math.inf, math.nan]), st.integers(0, 64 * 300 - 1), st.integers(0, 64 * 300 - 1))
def test_one_entry_among_many_is_not_finite(value, at, other):
    tensor = torch.ones(64 * 300)
    tensor[other], tensor[at] = 0, value
    moments, late = moments_and_late_tokens(place_of(tensor), (4, 48, 100))
    assert list(moments[4:]) == [int(at != other), 1]
    assert not math.isfinite(moments[1])
    assert late[1:].tolist() == [4 * 24, 0]


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.5, -3e38, math.inf, -math.inf, math.nan, -math.nan])),
    st.sampled_from([1.0, -2.0, 1e-40]),
)
def test_extremes_of_long_tensors(values, other):
    tensor = torch.full((LENGTH + 3,), other)
    tensor[: len(values)] = torch.tensor(values)
    found = host_moments(place_of(tensor))
    assert found[4] == (tensor == 0).sum()
    assert found[3] == tensor.abs().max() or (any(map(math.isnan, values)) and math.isnan(found[3]))
