from __future__ import annotations

from functools import reduce

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keelscope.store.series import united

rising = st.sets(st.integers(0, 30)).map(lambda steps: np.array(sorted(steps), np.int64))


@given(st.lists(rising, min_size=1, max_size=4))
def test_all_steps_of_several_sequences(sequences):
    found = united(sequences)
    assert found.dtype == np.int64
    np.testing.assert_array_equal(found, reduce(np.union1d, sequences))
