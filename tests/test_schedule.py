"""Which steps are recorded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keelscope.errors import UsageError
from keelscope.schedule import Schedule, as_schedule


@given(every=st.integers(1, 50), dense=st.integers(0, 50), step=st.integers(0, 500))
def test_dense_then_sparse(every, dense, step):
    assert Schedule(every, dense).records(step) == (step < dense or step % every == 0)


def test_the_first_step_is_always_recorded():
    assert all(Schedule(every, dense).records(0) for every in (1, 7) for dense in (0, 3))


@pytest.mark.parametrize("options", [{"every": 0}, {"every": -1}, {"dense": -1}])
def test_unusable(options):
    with pytest.raises(UsageError, match=r"needs every >= 1 and dense >= 0; got"):
        Schedule(**options)


@pytest.mark.parametrize("value", [True, 2.0, "3", None])
def test_neither_int_nor_schedule(value):
    with pytest.raises(UsageError, match=r"every must be a positive int or a keelscope.Schedule"):
        as_schedule(value)


def test_an_int_is_a_schedule():
    assert as_schedule(4) == Schedule(every=4)
    assert as_schedule(Schedule(2, dense=5)) == Schedule(2, dense=5)
