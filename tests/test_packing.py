"""Lines that packed tensors are cut into."""

import math

import numpy as np
import pytest
import torch

from keelscope.kernel import Routine
from keelscope.packing import Packing
from keelscope.rooms import BLOCK, LENGTH, LINE

LENGTHS = [LENGTH + 1, 3, 0, BLOCK, LINE, 3, LENGTH + LINE, 1, BLOCK + 1, LENGTH, BLOCK - 1, 0, LENGTH + LINE, 3]


def squares(several):
    rows, left = Packing().pack_all(Routine.SQUARES, several)
    assert left == []
    return rows


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1], [3], [64] * 700, [BLOCK] * 3, [0, 0], []])
def test_squares_of_any_length_go_to_their_own_tensor(lengths):
    several = [torch.randn(length) for length in lengths]
    rows = squares(several)
    assert rows[:, 0].tolist() == lengths
    expected = [float(tensor.double().square().sum()) for tensor in several]
    np.testing.assert_allclose(rows[:, 1], expected, rtol=1e-13)


@pytest.mark.parametrize("place", range(len(LENGTHS)))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_with_its_tensor(place, value):
    several = [torch.ones(length) for length in LENGTHS]
    several[place][-1:] = value
    rows = squares(several)
    expected = [float(length) for length in LENGTHS]
    if LENGTHS[place]:
        expected[place] = value
    np.testing.assert_array_equal(rows[:, 1], expected)


def test_a_plan_leaves_nothing_of_the_time_before():
    packing, several = Packing(), [torch.randn(length) for length in LENGTHS]
    packing.pack_all(Routine.SQUARES, several)
    packing.pack_all(Routine.SQUARES, several[::-1])
    rows, _ = packing.pack_all(Routine.SQUARES, [torch.zeros_like(tensor) for tensor in several])
    assert not rows[:, 1].any()
