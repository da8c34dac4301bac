import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keelscope.store.across import combined

NUMBERS = st.floats(0, 1e300, allow_nan=False)


@given(st.lists(st.tuples(NUMBERS, st.booleans()), min_size=1, max_size=5))
def test_values_that_were_not_seen_take_no_part(pairs):
    values = np.array([value for value, _ in pairs]).reshape(-1, 1, 1)
    seen = np.array([is_seen for _, is_seen in pairs]).reshape(-1, 1, 1)
    held = [value for value, is_seen in pairs if is_seen]
    wanted = {"max": max, "root_sum_squares": lambda x: math.hypot(*x), "rms": lambda x: math.hypot(*x) / len(x) ** 0.5}
    for how, by_hand in wanted.items():
        found = combined(how, values, seen).item()
        assert math.isclose(found, by_hand(held), rel_tol=1e-12) if held else math.isnan(found)


def test_the_ends_of_float64_survive():
    tiny = np.array([3e-200, 4e-200]).reshape(2, 1, 1)
    assert math.isclose(combined("root_sum_squares", tiny, tiny > 0).item(), 5e-200)
    assert math.isclose(combined("rms", 1e300 * (tiny * 1e200), tiny > 0).item(), 5e300 / 2**0.5)


def test_a_computed_nan_stays_nan_and_infinity_stays_infinite():
    values = np.array([[math.nan, math.inf], [1.0, 2.0]]).reshape(2, 1, 2)
    for how in ("sum", "mean", "max", "rms", "root_sum_squares"):
        found = combined(how, values, np.ones((2, 1, 2), bool))[0]
        assert math.isnan(found[0])
        assert math.isinf(found[1])


def test_what_cannot_be_combined_is_the_first_ranks_and_extra_axes_are_kept():
    values = np.arange(12.0).reshape(2, 1, 2, 3)
    seen = np.ones((2, 1, 2), bool)
    assert combined("", values, seen).tolist() == values[0].tolist()
    assert combined("sum", values, seen).tolist() == (values[0] + values[1]).tolist()
