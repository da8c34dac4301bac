from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from keelscope.analysis.attribution import CAUSES, attribute
from keelscope.analysis.profile import FLOAT32_FLOOR

KEYS = ("output_gradient", "sum_gradient", "shortcut_part", "input_gradient")
ODD = st.sampled_from([0.0, np.nan, np.inf, 1e-45, 1e-310])
VALUE = st.floats(1e-36, 1e30) | st.floats(1e-3, 1e3)


def split(values, **options):
    return attribute(*(values[key] for key in KEYS), **options)


@pytest.mark.parametrize(
    "form",
    [
        {"post": True},
        {"pre": True},
        {"alpha": 64.0, "pre": True, "post": True},
        {"alpha": 0.9, "beta": 0.1},
        {"alpha": 0.5, "beta": 2.0, "post": True},
        {"beta": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("depth", [1, 64, 256])
def test_the_shares_add_up_to_the_measured_total(stack, form, depth):
    values = stack.measure(depth, **form)
    attribution = split(values)
    measured = np.log10(values["input_gradient"][0] / values["output_gradient"][-1])
    assert sum(attribution.totals.values()) == pytest.approx(measured, abs=1e-6)
    assert attribution.total == pytest.approx(measured, abs=1e-12)
    np.testing.assert_allclose(attribution.other, 0.0, atol=1e-9)


def test_each_part_is_its_formula(stack):
    values = stack.measure(8, alpha=3.0, beta=0.5, post=True)
    attribution = split(values)
    np.testing.assert_allclose(attribution.scale, np.log10(3.0), atol=1e-12)
    np.testing.assert_allclose(10**attribution.norm, values["sum_gradient"] / values["output_gradient"])
    np.testing.assert_allclose(10**attribution.branch, values["input_gradient"] / values["shortcut_part"])


def test_without_norm_or_weight_all_is_the_branches(stack):
    totals = split(stack.measure(32, pre=True)).totals
    assert totals["norm"] == totals["scale"] == 0.0
    assert totals["branch"] == pytest.approx(sum(totals.values()))


def test_an_embedding_end_is_what_remains(stack):
    values = stack.measure(16, post=True)
    attribution = split(values, end=100 * values["input_gradient"][0])
    assert attribution.totals["embedding"] == pytest.approx(2.0)
    assert attribution.total == pytest.approx(attribution.stream + 2.0)


def test_a_cut_shortcut_leaves_all_to_the_branch():
    attribution = attribute([1.0, 1.0], [1.0, 1.0], [0.0, 1.0], [0.1, 1.0])
    assert (attribution.scale[0], attribution.branch[0]) == (0.0, pytest.approx(-1.0))


def test_a_part_that_is_not_known_goes_to_other():
    nan = np.nan
    attribution = attribute([10.0, 10.0], [nan, 10.0], [nan, nan], [1.0, 10.0])
    totals = attribution.totals
    assert totals.pop("other") == pytest.approx(-1.0)
    assert list(totals.values()) == [0.0] * 4


def test_what_lies_in_a_gap_goes_to_other():
    ones = np.ones(4)
    after, before = np.array([0.01, np.nan, 1.0, 1.0]), np.array([0.01, 0.3, 1.0, 1.0])
    attribution = attribute(after, after, after, before)
    assert attribution.used.tolist() == [True, False, True, True]
    assert np.isnan(attribution.other[1])
    assert attribution.totals["other"] == pytest.approx(-2.0)
    assert attribute(ones, ones, ones, ones).totals["other"] == 0.0


def test_below_the_float_floor_nothing_is_attributed():
    level = 10.0 ** np.arange(-44.0, 0.0)
    attribution = attribute(level, level, level, level / 10)
    assert attribution.used.sum() == (level / 10 >= FLOAT32_FLOOR).sum()
    assert attribution.total == pytest.approx(-np.float64(attribution.used.sum()))


@pytest.mark.parametrize("nothing", [np.empty(0), np.full(3, np.nan), np.zeros(3)], ids=["empty", "nan", "zero"])
def test_without_a_gradient_nothing_is_known(nothing):
    attribution = attribute(nothing, nothing, nothing, nothing, end=1.0)
    assert np.isnan(attribution.total)
    assert attribution.largest is None


def test_norm_and_weight_that_cancel_are_one_cause(stack):
    attribution = split(stack.measure(64, alpha=64.0, post=True))
    assert attribution.totals["scale"] > 100
    (together,) = [cause for cause in attribution.causes if cause.name == "norm and scale"]
    assert together.decades == pytest.approx(attribution.totals["norm"] + attribution.totals["scale"])
    assert abs(together.decades) < 0.1
    assert {cause.name for cause in split(stack.measure(64, post=True)).causes} == set(CAUSES)


def test_branches_off_the_stream_are_told_with_what_lies_between():
    level = 10.0 ** np.arange(4.0)
    attribution = attribute(level, level, level, 10 * level[::-1])
    names = {cause.name for cause in attribution.causes}
    assert names == {"norm", "scale", "branch and other", "embedding"}
    assert sum(cause.decades for cause in attribution.causes) == pytest.approx(attribution.total)


def test_the_largest_cause():
    ones = np.ones(3)
    largest = attribute(ones, 0.1 * ones, 0.1 * ones, ones).largest
    assert largest.name in {"norm", "branch"}
    assert abs(largest.decades) == pytest.approx(3.0)


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(*[arrays(float, n, elements=VALUE | ODD)] * 4)), VALUE | ODD)
def test_the_shares_telescope_whatever_was_recorded(parts, end):
    attribution = attribute(*parts, end=end)
    assert not np.isinf(list(attribution.totals.values())).any()
    if attribution.used.any():
        used = np.flatnonzero(attribution.used)
        measured = np.log10(parts[3][used[0]]) - np.log10(parts[0][used[-1]])
        remainder = 0.0 if np.isnan(attribution.embedding) else attribution.embedding
        assert sum(attribution.totals.values()) == pytest.approx(measured + remainder, abs=1e-6)
        assert sum(c.decades for c in attribution.causes) == pytest.approx(attribution.total, abs=1e-6)
