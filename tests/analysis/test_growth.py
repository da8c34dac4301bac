"""Growth laws: found on clean and noisy data, whatever the unit, and undecided where nothing decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keelscope.analysis.growth import growth_law

DEPTH = np.arange(1.0, 65.0)
LAWS = {
    "level": np.full(64, 3.0),
    "linear": 1 + 0.4 * DEPTH,
    "power": DEPTH**2.2,
    "exponential": 1.08**DEPTH,
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_law(law, noise, seed):
    values = LAWS[law] * np.exp(noise * np.random.default_rng(seed).normal(size=64))
    found = growth_law(DEPTH, values)
    assert found.law == law
    assert found.is_decided


@given(scale=st.floats(1e-20, 1e20), unit=st.integers(1, 8), law=st.sampled_from(sorted(LAWS)))
def test_units_change_nothing(scale, unit, law):
    """The law is one of the shape: neither the unit of the values nor blocks instead of sub-layers decide."""
    assert growth_law(unit * DEPTH, scale * LAWS[law]).law == law


def test_rates():
    assert growth_law(DEPTH, LAWS["power"]).rate == pytest.approx(2.2)
    assert growth_law(DEPTH, LAWS["exponential"]).rate == pytest.approx(np.log10(1.08))
    assert growth_law(DEPTH, LAWS["linear"]).rate == pytest.approx(0.4, rel=0.1)
    assert growth_law(DEPTH, LAWS["level"]).rate == 0


def test_missing_values_are_left_out():
    values = LAWS["exponential"].copy()
    values[[3, 10, 20]] = np.nan, 0.0, np.inf
    assert growth_law(DEPTH, values).law == "exponential"


def test_too_little_and_undecided():
    assert growth_law(DEPTH[:3], DEPTH[:3]).law == "unknown"
    assert not growth_law(DEPTH[:3], DEPTH[:3]).is_decided
    small = np.exp(0.01 * np.arange(6))  # 5 % over six layers: every law with a slope fits
    assert not growth_law(np.arange(20.0, 26.0), small).is_decided


def test_a_sum_of_unlike_branches_is_linear_and_a_stream_of_its_own_multiples_exponential():
    rng = np.random.default_rng(0)
    streams = {"linear": rng.normal(size=(4096,)), "exponential": rng.normal(size=(4096,))}
    variances: dict[str, list[float]] = {name: [] for name in streams}
    for _ in range(48):
        streams["linear"] = streams["linear"] + rng.normal(size=4096)
        streams["exponential"] = streams["exponential"] + 0.4 * streams["exponential"].std() * rng.normal(size=4096)
        for name, stream in streams.items():
            variances[name].append(float(stream.var()))
    assert {name: growth_law(DEPTH[:48], found).law for name, found in variances.items()} == {n: n for n in streams}
