from __future__ import annotations

import numpy as np
import pytest

from keelscope.analysis.compare import common_depth
from keelscope.analysis.profile import depth_profile
from keelscope.errors import UsageError


def profile_of(n, value=1.0):
    return depth_profile(np.full(n, value))


def test_like_chains_are_compared_by_depth():
    rising = depth_profile(10.0 ** np.arange(8.0))
    found = common_depth([rising, profile_of(8)], bins=4)
    assert found.axis == "depth"
    assert found.edges.tolist() == [0, 2, 4, 6, 8]
    assert found.levels[0].tolist() == [0.5, 2.5, 4.5, 6.5]
    assert found.levels[1].tolist() == [0, 0, 0, 0]


def test_bins_hold_every_layer_once():
    values = 10.0 ** np.arange(10.0)
    found = common_depth([depth_profile(values), profile_of(10)], bins=4)
    sizes = np.diff(found.edges)
    assert sizes.sum() == 10
    assert sizes.max() - sizes.min() <= 1
    starts = found.edges[:-1].astype(int)
    expected = [np.median(np.arange(10.0)[a : a + int(n)]) for a, n in zip(starts, sizes, strict=True)]
    assert found.levels[0].tolist() == expected


def test_different_depths_meet_on_relative_depth():
    found = common_depth([depth_profile(10.0 ** np.arange(16.0)), depth_profile([1.0, 10.0, 100.0, 1e3])], bins=8)
    assert found.axis == "relative depth"
    assert (found.edges[0], found.edges[-1]) == (0.0, 1.0)
    assert found.levels[0].tolist() == [0.5, 2.5, 4.5, 6.5, 8.5, 10.5, 12.5, 14.5]
    assert found.levels[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_was_not_observed_stays_open():
    found = common_depth([depth_profile([1.0, np.nan, 1.0, 1.0]), profile_of(4)], bins=4)
    assert np.isnan(found.levels[0, 1])
    assert np.isfinite(found.levels[1]).all()


def test_nothing_at_all_still_compares():
    assert np.isnan(common_depth([depth_profile([]), depth_profile([])]).levels).all()


@pytest.mark.parametrize("n", [1, 9])
def test_two_to_eight(n):
    with pytest.raises(UsageError, match=f"{n} profiles were given; a comparison takes 2 to 8"):
        common_depth([profile_of(4)] * n)
