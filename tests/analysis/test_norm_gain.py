"""The product of gains over depth, against multiplying them one by one."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keelscope.analysis.norm_gain import cumulative, shortcut_weights
from keelscope.store.schema import SublayerInfo


@given(st.lists(st.one_of(st.floats(1e-6, 1e6), st.just(math.nan)), max_size=40))
def test_each_entry_is_the_product_of_what_lies_above(gains: list[float]) -> None:
    left = 0.0
    expected = []
    for gain in reversed(gains):
        left += 0.0 if math.isnan(gain) else math.log10(gain)
        expected.append(math.nan if math.isnan(gain) else left)
    np.testing.assert_allclose(cumulative(gains), expected[::-1], rtol=1e-9, atol=1e-9)


def test_nothing_passes_an_exact_zero() -> None:
    assert cumulative([2.0, 0.0, 10.0]).tolist() == [-math.inf, -math.inf, 1.0]


def test_steps_are_multiplied_each_for_itself() -> None:
    table = np.array([[0.5, 0.5], [10.0, 0.1]])
    np.testing.assert_allclose(cumulative(table), [[2 * math.log10(0.5), math.log10(0.5)], [0.0, -1.0]], atol=1e-12)


def test_post_ln_loses_the_square_root_of_two_per_norm() -> None:
    """A branch of the power of the stream: 2^(-1/2) per norm, 0.15 decades each."""
    np.testing.assert_allclose(cumulative(np.full(100, 2**-0.5))[0], -100 * 0.5 * math.log10(2))


def test_only_norms_on_the_sum_have_a_weight() -> None:
    sublayers = [
        SublayerInfo("x + F(n x)", norm_before="a"),
        SublayerInfo("n(a x + F(n x))", norm_before="b", norm_after="c", alpha=12.0),
        SublayerInfo("n(g x + F(x))", norm_after="d"),
    ]
    assert shortcut_weights(sublayers) == {"c": 12.0, "d": 1.0}
