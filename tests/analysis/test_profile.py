from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from keelscope.analysis.profile import FLOAT32_FLOOR, depth_profile, theil_sen

levels = arrays(np.float64, st.integers(4, 40), elements=st.floats(-25, 5, width=32))


def every_pair(x, y):
    slopes = [(y[j] - y[i]) / (x[j] - x[i]) for i, j in itertools.combinations(range(len(x)), 2)]
    slopes.sort()
    middle = len(slopes) // 2
    return slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2


@given(levels, st.integers(0, 2**32 - 1))
def test_theil_sen_is_the_median_of_all_pairs(y, seed):
    x = np.cumsum(np.random.default_rng(seed).uniform(0.1, 3, len(y)))
    assert theil_sen(x, y) == pytest.approx(every_pair(x, y), rel=1e-12, abs=1e-12)


def test_theil_sen_agrees_with_scipy():
    from scipy.stats import theilslopes

    rng = np.random.default_rng(0)
    x = np.arange(101.0)
    y = 0.3 * x + rng.standard_cauchy(101)
    assert theil_sen(x, y) == pytest.approx(theilslopes(y, x).slope, rel=1e-12)


def test_a_quarter_of_the_points_may_be_wrong():
    y = 0.1 * np.arange(40.0)
    y[::4] = 1e6 * (-1) ** np.arange(10)
    assert theil_sen(np.arange(40.0), y) == pytest.approx(0.1, abs=0.02)


def test_more_than_2000_points_are_reduced_and_keep_their_slope():
    rng = np.random.default_rng(1)
    x = np.arange(12_345.0)
    assert theil_sen(x, -0.01 * x + rng.normal(0, 0.1, x.size)) == pytest.approx(-0.01, rel=1e-4)


@pytest.mark.parametrize("n", [0, 1])
def test_no_slope_through_less_than_two_points(n):
    assert np.isnan(theil_sen(np.arange(n), np.arange(n)))


@given(levels, st.floats(1e-6, 1e6))
def test_scale_changes_nothing_but_the_level(y, c):
    one, scaled = depth_profile(10.0**y), depth_profile(c * 10.0**y)
    for field in ("slope", "total", "span"):
        assert getattr(scaled, field) == pytest.approx(getattr(one, field), abs=1e-9)
    assert scaled.fitted == one.fitted
    assert np.allclose(scaled.levels - one.levels, np.log10(c))


@given(levels)
def test_reversed_depth_has_the_opposite_slope(y):
    one, reversed_ = depth_profile(10.0**y), depth_profile(10.0 ** y[::-1])
    assert reversed_.slope == pytest.approx(-one.slope, abs=1e-9)
    assert reversed_.span == pytest.approx(one.span)
    assert reversed_.flatness == one.flatness


@given(st.integers(4, 300), st.floats(-0.3, 0.3), st.sampled_from([1, 2, 4]))
def test_a_straight_profile_has_its_slope_in_units_of_depth(n, slope, per_layer):
    depth = per_layer * np.arange(1.0, n + 1)
    profile = depth_profile(10.0 ** (slope * (depth - depth[-1] / 2) / max(1, n / 20)), depth)
    assert profile.slope == pytest.approx(slope / max(1, n / 20), abs=1e-9)
    assert profile.total == pytest.approx(profile.slope * n * per_layer)
    assert profile.length == n * per_layer


def test_positive_means_smaller_at_the_input():
    assert depth_profile([1e-6, 1e-5, 1e-4, 1e-3]).total == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("n", "first", "last"), [(4, 0, 3), (5, 0, 4), (6, 1, 4), (10, 1, 8), (64, 6, 57), (20, 2, 17)]
)
def test_fitted_layers_are_the_middle_80_percent(n, first, last):
    values = np.ones(n)
    values[:first] = values[last + 1 :] = 1e6
    profile = depth_profile(values)
    assert profile.fitted == last - first + 1
    assert profile.span == 0.0


def test_ends_do_not_move_the_slope():
    values = np.ones(64)
    values[:2] = 40.0
    assert depth_profile(values).slope == 0.0


def test_values_under_the_float32_floor_are_left_out_and_counted():
    y = np.linspace(-60, -2, 30)
    profile = depth_profile(10.0**y)
    assert profile.floored == int((10.0**y < FLOAT32_FLOOR).sum())
    assert profile.slope == pytest.approx(2.0)
    assert profile.observed == 30
    assert np.isnan(profile.levels[0])


def test_zeros_below_a_profile_that_underflows_are_no_zeros():
    profile = depth_profile([0.0, 0.0, 0.0, 1e-32, 1e-16, 1.0])
    assert (profile.zeros, profile.floored) == (0, 3)
    assert profile.total == pytest.approx(16 * 6)


def test_one_usable_layer_above_the_floor_still_tells_the_direction():
    profile = depth_profile([0.0, 0.0, 1e-40, 1e-40, 1e-40, 1e-20])
    assert profile.slope == pytest.approx(17.0)


def test_exact_zeros_among_healthy_values_are_kept_apart():
    profile = depth_profile([0.0, 0.0, 1e-3, 1e-3, 1e-3, 1e-3])
    assert (profile.zeros, profile.floored, profile.observed) == (2, 0, 6)
    assert profile.slope == 0.0


@pytest.mark.parametrize("hole", [np.nan, np.inf])
def test_what_is_not_finite_is_not_observed(hole):
    profile = depth_profile([1.0, hole, 1.0, 1.0, 1.0])
    assert profile.observed == 4
    assert profile.slope == 0.0


def test_flatness_is_the_share_near_the_median():
    assert depth_profile([1.0] * 8 + [10.0, 1e-3]).flatness == pytest.approx(0.8)
    assert depth_profile([1.0] * 5).flatness == 1.0


def test_knee_names_the_neighbours_and_its_excess_over_the_slope():
    y = np.concatenate([np.arange(-20.0, -10), np.arange(-7.0, 3)])
    knee = depth_profile(10.0**y).knee
    assert (knee.lower, knee.upper) == (9, 10)
    assert knee.change == pytest.approx(4.0)
    assert knee.excess == pytest.approx(3.0, abs=0.3)


def test_knee_compares_neighbours_of_one_role_only():
    values = np.tile([1.0, 1e-4], 6)
    assert depth_profile(values).knee.change == pytest.approx(-4.0)
    assert depth_profile(values, roles=["attention", "ffn"] * 6).knee.change == 0.0


def test_knee_leaves_the_first_block_out():
    values = [100.0, 100.0] + [1.0] * 10
    assert depth_profile(values).knee.change == pytest.approx(-2.0)
    assert depth_profile(values, skip=2).knee.change == 0.0


def test_an_empty_profile_has_no_figures():
    profile = depth_profile([])
    assert profile.observed == profile.fitted == 0
    assert profile.knee is None
    assert np.isnan([profile.slope, profile.span, profile.flatness]).all()


@settings(max_examples=30, deadline=None)
@given(
    arrays(
        np.float64,
        st.integers(0, 30),
        elements=st.one_of(st.floats(0, 1e30), st.sampled_from([0.0, np.nan, np.inf, 1e-40])),
    )
)
def test_any_values_give_a_profile(values):
    profile = depth_profile(values)
    assert profile.observed == int(np.isfinite(values).sum())
    assert profile.zeros + profile.floored <= profile.observed
