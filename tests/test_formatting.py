from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keelscope.formatting import count, decades, number, times


@given(st.floats(1e-300, 1e300) | st.floats(-1e300, -1e-300))
def test_three_significant_digits(value):
    text = number(value)
    assert float(text) == pytest.approx(value, rel=5.1e-3)
    digits = text.lstrip("-").split("e")[0].replace(".", "").lstrip("0")
    assert len(digits) == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01, "0.0100"),
        (0.009999, "0.0100"),
        (0.00999, "9.99e-03"),
        (999.4, "999"),
        (999.6, "1.00e+03"),
        (1e-320, "1.00e-320"),
    ],
)
def test_boundaries(value, text):
    assert number(value) == text


def test_four_kinds_of_nothing_are_distinct():
    texts = [number(v) for v in (0.0, math.nan, math.inf, -math.inf, None)]
    assert len(set(texts)) == 5
    assert number(-0.0) == "0"


@given(st.floats(-50, 50))
def test_decades_carry_a_sign(value):
    assert decades(value)[0] in ("0" if abs(value) < 0.005 else "+-")


@pytest.mark.parametrize(
    ("exponent", "text"), [(0.0, "x1.00"), (-4.4512, "x3.54e-05"), (2.0, "x100"), (math.nan, "NaN"), (310.0, "x1e+310")]
)
def test_factors(exponent, text):
    assert times(exponent) == text


def test_counts():
    assert [count(n, "entry") for n in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
    assert count(2.0, "sub-layer") == "2 sub-layers"
