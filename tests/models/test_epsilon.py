from __future__ import annotations

import itertools

import pytest

from keelscope import models
from keelscope.models.epsilon import EpsilonSchedule, set_epsilon


def test_epsilon_falls_by_equal_factors_and_then_stays():
    schedule = EpsilonSchedule(start=1e-4, end=1e-6, steps=8)
    values = [schedule.at(step) for step in range(12)]
    assert values[0] == pytest.approx(1e-4)
    assert values[8:] == pytest.approx([1e-6] * 4)
    ratios = [later / earlier for earlier, later in itertools.pairwise(values[:9])]
    assert ratios == pytest.approx([100**-0.125] * 8)


def test_a_constant_is_a_schedule_too():
    assert {EpsilonSchedule(start=1e-5, end=1e-5, steps=3).at(step) for step in range(5)} == {1e-5}


@pytest.mark.parametrize("norm", ["rms", "layer", "scale"])
def test_every_norm_of_a_model_is_set(norm):
    model = models.build("keel", depth=4, width=16, heads=2, norm=norm)
    assert set_epsilon(model, 1e-3) == 7
    assert {module.eps for module in model.modules() if hasattr(module, "eps")} == {1e-3}


def test_a_schedule_that_cannot_be_used():
    with pytest.raises(ValueError, match="end = 0 cannot be used: give a number above 0"):
        EpsilonSchedule(end=0)
