from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from keelscope.terminal.sparkline import Scale, bar, columns, sparkline, stretch

profiles = arrays(np.float64, st.integers(0, 200), elements=st.one_of(st.floats(-40, 40), st.just(np.nan)))


def test_a_flat_profile_looks_flat():
    noisy = -4 + 0.01 * np.sin(np.arange(50))
    assert len(set(sparkline(noisy, 50))) <= 2


def test_a_scale_spans_a_decade_at_least():
    assert Scale.over([1.0, 1.2]) == Scale(pytest.approx(0.6), pytest.approx(1.6))
    assert Scale.over([0.0, 5.0]) == Scale(0.0, 5.0)
    assert Scale.over([np.nan]) == Scale(0.0, 1.0)


def test_missing_layers_are_dots():
    assert sparkline([0.0, np.nan, 1.0], 3) == "▁·█"


@given(profiles, st.integers(1, 60), st.integers(1, 6))
def test_a_chart_has_its_size(levels, width, rows):
    chart = columns(levels, width, rows)
    assert len(chart) == rows
    assert len({len(line) for line in chart}) == 1
    assert len(chart[0]) <= max(width, 0)


@given(st.lists(st.floats(-40, 40), min_size=2, max_size=30))
def test_higher_levels_have_higher_columns(levels):
    chart = columns(levels, len(levels), 4)
    heights = [sum(" ▁▂▃▄▅▆▇█".index(line[i]) for line in chart) for i in range(len(levels))]
    for i, j in zip(range(len(levels)), range(1, len(levels)), strict=False):
        if levels[i] <= levels[j]:
            assert heights[i] <= heights[j]
    assert min(heights) >= 1


def test_stretch_takes_medians_or_repeats():
    assert stretch(np.arange(9.0), 3).tolist() == [1.0, 4.0, 7.0]
    assert stretch([1.0, 2.0, 3.0], 7).tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert stretch([], 5).tolist() == []
    assert np.isnan(stretch([np.nan] * 10, 2)).all()


@given(st.floats(-40, 40), st.integers(1, 20))
def test_bars_are_never_empty_nor_too_long(level, width):
    drawn = bar(level, Scale(-30.0, 10.0), width)
    assert len(drawn) == width
    assert drawn.strip()


def test_no_bar_for_what_is_missing():
    assert bar(np.nan, Scale(0, 1), 5) == "     "
