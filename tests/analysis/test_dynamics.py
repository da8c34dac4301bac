from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from keelscope.analysis.dynamics import course, median_over_steps, onset

tables = arrays(
    np.float64,
    array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=7),
    elements=st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)),
)


@given(tables)
def test_course_against_a_loop(table):
    found = course(table)
    for i in range(table.shape[1]):
        seen = [v for v in table[:, i] if not math.isnan(v)]
        expected = (seen[0], seen[-1], statistics.median(seen)) if seen else (math.nan,) * 3
        np.testing.assert_allclose((found.first[i], found.last[i], found.median[i]), expected)


@given(tables, st.floats(1e-3, 1e3))
def test_the_median_scales(table, c):
    np.testing.assert_allclose(median_over_steps(c * table), c * median_over_steps(table))


def test_no_steps():
    found = course(np.empty((0, 3)))
    assert np.isnan(found.first).all()
    assert found.median.shape == (3,)


def test_infinities_stay():
    assert median_over_steps([[np.inf, 1.0], [np.inf, 3.0]]).tolist() == [np.inf, 2.0]


@given(arrays(bool, array_shapes(min_dims=2, max_dims=2, max_side=6)))
def test_onset_against_a_loop(flags):
    expected = [next((k for k, flag in enumerate(column) if flag), -1) for column in flags.T]
    assert onset(flags).tolist() == expected


@pytest.mark.parametrize("sites", [0, 2])
def test_onset_without_steps(sites):
    assert onset(np.empty((0, sites), dtype=bool)).tolist() == [-1] * sites
