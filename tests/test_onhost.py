"""Sums in numpy against the same in Python, entry by entry."""

from __future__ import annotations

import math

import pytest
import torch

from keelscope.onhost import host_entries, host_moments, host_squares

SAMPLES = {
    "one": [3.0],
    "mixed": [1.0, -4.0, 0.0, 2.5, 0.0],
    "large and near": [1e6 + 1, 1e6 - 1, 1e6],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", SAMPLES.values(), ids=SAMPLES)
def test_moments_and_squares(values, dtype):
    entries = host_entries(torch.tensor(values, dtype=dtype))
    mean = math.fsum(values) / len(values)
    ((count, middle, centred, top, zeros, nonfinite),) = host_moments(entries)
    assert (count, top, zeros, nonfinite) == (len(values), max(map(abs, values)), values.count(0.0), 0)
    assert middle == pytest.approx(mean)
    assert centred == pytest.approx(math.fsum((value - mean) ** 2 for value in values))
    assert host_squares(entries) == pytest.approx(math.fsum(value**2 for value in values))


def test_long_tensors_come_in_pieces():
    entries = host_entries(torch.ones(3 * (1 << 16) + 1))
    pieces = host_moments(entries)
    assert pieces[:, 0].tolist() == [1 << 16, 1 << 16, 1 << 16, 1]
    assert host_squares(entries) == len(entries)


def test_what_is_not_finite_is_counted():
    bad = torch.tensor([1.0, math.inf, -math.inf, math.nan])
    assert host_moments(host_entries(bad))[0, 5] == 3


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64), torch.nn.Parameter(torch.ones(2))],
    ids=["bfloat16", "whole numbers", "subclass"],
)
def test_what_numpy_is_not_asked_for(tensor):
    assert host_entries(tensor) is None


def test_the_memory_is_shared():
    tensor = torch.zeros(2)
    tensor[0] = 5.0
    entries = host_entries(tensor)
    tensor[1] = 7.0
    assert entries.tolist() == [5.0, 7.0]
