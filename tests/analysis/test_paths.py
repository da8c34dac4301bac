from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from keelscope.analysis.paths import cumulative, shortcut_path

KEYS = ("shortcut_only_gradient", "predicted_slope", "branch_gain", "alpha")


def path_of(values, **changes):
    only, law, v, alpha = (values[key] for key in KEYS)
    top = values["output_gradient"][-1]
    options = {"shortcut_only": only, "top": top, "predicted_slope": law, "branch_gain": v, "alpha": alpha}
    return shortcut_path(values["shortcut_gain"], **{**options, **changes})


def test_post_norms_lose_what_the_law_says(stack):
    path = path_of(stack.measure(128, post=True, width=64, scale=0.5))
    assert path.lost == pytest.approx(path.slope * 128, rel=0.05)
    assert path.lost == pytest.approx(-path.from_top[0], rel=0.1)  # a linear stack prefers directions
    assert path.from_top[0] == pytest.approx(path.from_bottom[-1])
    assert path.predicted[0] == pytest.approx(path.from_top[0], rel=0.03)
    assert path.predicted[0] == pytest.approx(-64 * np.log10(1 + path.mean_branch_gain), rel=0.03)
    assert path.is_measured.all()


def test_a_plain_shortcut_loses_nothing_at_all(stack):
    path = path_of(stack.measure(64, pre=True))
    assert (path.lost, path.slope, path.from_top[0]) == (0.0, 0.0, 0.0)


def test_a_convex_gate_loses_its_weight_per_sublayer(stack):
    path = path_of(stack.measure(64, alpha=0.9, beta=0.1))
    assert path.slope == pytest.approx(-np.log10(0.9))
    assert path.lost == pytest.approx(-64 * np.log10(0.9))
    assert path.mean_alpha == pytest.approx(0.9)


def test_a_large_weight_under_a_norm_keeps_it(stack):
    assert abs(path_of(stack.measure(64, alpha=64.0, post=True, width=64)).lost) < 0.05


def test_under_the_float_floor_the_gains_go_on():
    gain = np.full(400, 0.5)
    only = np.concatenate([[0.0], 0.5 ** np.arange(399, 0, -1.0)])
    only[only < 1e-45] = 0.0
    path = shortcut_path(gain, shortcut_only=only, top=1.0)
    assert path.floored == (only < 1e-37).sum()
    assert path.slope == pytest.approx(np.log10(2))
    assert path.lost == pytest.approx(400 * np.log10(2))
    np.testing.assert_array_equal(path.is_measured, only >= 1e-37)


def test_without_gains_only_what_is_measured_is_said():
    path = shortcut_path(np.full(4, np.nan), shortcut_only=[0.0, 1e-40, 0.1, 1.0], top=1.0)
    assert np.isnan(path.carried[:2]).all()
    assert path.lost == pytest.approx(1.0)
    assert path.missing == 4


def test_a_cut_shortcut_is_endless():
    path = shortcut_path([1.0, 0.0, 1.0], shortcut_only=[0.0, 0.0, 1.0], top=1.0)
    assert path.lost == np.inf
    assert path.from_top.tolist() == [-np.inf, -np.inf, 0.0]


def test_gaps_are_left_out_of_the_sums():
    path = shortcut_path([0.1, np.nan, 0.1], shortcut_only=[np.nan] * 3)
    np.testing.assert_equal(path.from_top, [-2.0, np.nan, -1.0])
    np.testing.assert_equal(path.carried, [-2.0, np.nan, -1.0])
    assert path.missing == 1
    assert np.isnan([path.mean_branch_gain, path.mean_alpha, path.slope]).all()


@pytest.mark.parametrize("values", [[], [np.nan], [np.inf, -1.0]], ids=str)
def test_nothing_known_is_nan(values):
    assert np.isnan(shortcut_path(values).lost)


@given(arrays(float, st.integers(0, 30), elements=st.floats(-9, 9) | st.just(np.nan)))
def test_sums_from_both_ends_meet(decades):
    up, down = cumulative(decades), cumulative(decades[::-1])[::-1]
    np.testing.assert_array_equal(np.isnan(up), np.isnan(decades))
    np.testing.assert_allclose(up + down - decades, np.where(np.isnan(decades), np.nan, np.nansum(decades)), atol=1e-9)


def test_a_zero_below_open_shortcuts_is_of_other_tokens():
    """Class attention reads one token: the stream of the patches gets nothing by shortcuts, none of which is cut."""
    path = shortcut_path([0.5, 1.0, 1.0], shortcut_only=[0.0, 0.0, 2.0], top=2.0)
    assert path.carried.tolist() == [np.log10(0.5), 0.0, 0.0]
    assert path.is_measured.tolist() == [False, False, True]
    assert shortcut_path([1.0, 0.0, 1.0], shortcut_only=[0.0, 0.0, 2.0], top=2.0).lost == np.inf
