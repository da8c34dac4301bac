"""Terms of many tensors at once are those of each alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from keelscope.batch import WIDTH, Batch
from keelscope.kernel import Routine
from keelscope.onhost import place_of
from keelscope.packing import Packing
from keelscope.rooms import BLOCK, LENGTH
from keelscope.statistics import MOMENTS, SQUARES
from keelscope_probes.gradients import _late_tokens_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES = [(2, 3, 5), (2, 3, 5), (1, 1, 1), (2, 60, 64), (1, 3, LENGTH), (0, 2, 2), (3, 1, 7), (2, 64, 128)]


def tensors() -> list[torch.Tensor]:
    made = [torch.randn(shape).to(dtype) for dtype in DTYPES for shape in SHAPES for _ in range(3)]
    made[0][0, 0, 0] = float("nan")
    made[1].fill_(0.1)
    made[2].zero_()
    return made


def test_a_batch_gives_the_terms_of_each_tensor():
    batch, several = Batch(), tensors()
    table = np.zeros((len(several), WIDTH))
    for row, tensor in enumerate(several):
        batch.put(place_of(tensor), 7, tuple(tensor.shape), table, row)
    batch.flush()
    of_each = (MOMENTS.of, SQUARES.of, _late_tokens_of)
    expected = [np.concatenate([of(tensor).numpy() for of in of_each]) for tensor in several]
    np.testing.assert_allclose(table, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("routines", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 64, 128), (1, 3, LENGTH + 1), (3, 5, 4096), (3, 7, 1000)])
def test_long_tensors_give_what_is_wanted_of_them(shape, dtype, routines):
    batch, table = Batch(), np.zeros((3, WIDTH))
    several = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    several[1][:, -1] = -0.0
    several[2][0, 0, 0] = float("inf")
    for row, tensor in enumerate(several):
        batch.put(place_of(tensor), routines, shape, table, row)
    batch.flush()
    for bit, columns, of in (
        (0, slice(6), MOMENTS.of),
        (1, slice(6, 8), SQUARES.of),
        (2, slice(8, 11), _late_tokens_of),
    ):
        expected = [of(tensor).numpy() if routines >> bit & 1 else 0 * of(torch.ones(shape)) for tensor in several]
        np.testing.assert_allclose(table[:, columns], expected, rtol=1e-9, atol=1e-12)


def test_long_tensors_without_positions_have_no_late_tokens():
    batch, table, tensor = Batch(), np.zeros((1, WIDTH)), torch.randn(90, 128)
    batch.put(place_of(tensor), 5, None, table, 0)
    batch.flush()
    np.testing.assert_allclose(table[0, :6], MOMENTS.of(tensor), rtol=1e-9)
    assert not table[0, 6:].any()


def test_more_than_the_buffer_holds_is_summed_in_between():
    batch, table = Batch(), np.zeros((90, WIDTH))
    for row in range(len(table)):
        tensor = torch.full((2, 4, BLOCK // 8), float(row))
        batch.put(place_of(tensor), 5, tuple(tensor.shape), table, row)
        tensor.fill_(-1.0)  # what comes later does not count
    batch.flush()
    assert table[:, :2].tolist() == [[BLOCK, row] for row in range(len(table))]
    np.testing.assert_allclose(table[1:, 8], 4 * np.log10(np.arange(1, 90) * (BLOCK // 8) ** 0.5), rtol=1e-12)
    assert table[0, 8:].tolist() == [0, 0, 4]


@pytest.mark.parametrize(("routine", "terms"), [(Routine.SQUARES, SQUARES), (Routine.MOMENTS, MOMENTS)])
def test_packed_terms_are_those_of_each_tensor(routine, terms):
    packing, several = Packing(), [*tensors(), torch.randn(300, 200), torch.randn(6, 4).t()]
    for _ in range(2):  # the second time by the plan of the first
        rows, left = packing.pack_all(routine, several)
        here = [i for i in range(len(several)) if i not in left]
        expected = [terms.of(several[i]).numpy() for i in here]
        np.testing.assert_allclose(rows[here], expected, rtol=1e-9, atol=1e-12)
        assert set(left) <= {len(several) - 1}


def test_what_does_not_lie_in_host_memory_is_left():
    several = [torch.ones(2), torch.eye(3).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.cfloat)]
    rows, left = Packing().pack_all(Routine.SQUARES, several)
    assert rows[0].tolist() == [2, 2]
    assert left == [1, 2, 3]


@pytest.mark.parametrize("routine", [Routine.SQUARES, Routine.MOMENTS])
def test_empty_tensors_are_packed_wherever_they_stand(routine):
    for several in ([torch.empty(0), torch.ones(3)], [torch.ones(3), torch.empty(0)], [torch.empty(0)]):
        rows, left = Packing().pack_all(routine, several)
        assert rows[:, 0].tolist() == [tensor.numel() for tensor in several]
        assert left == []


def test_sums_of_tokens_wait_in_bounds():
    batch, table = Batch(), np.zeros((40, WIDTH))
    several = [torch.randn(1, 5_000 + row % 2, 2) for row in range(len(table))]
    for row, tensor in enumerate(several):
        batch.put(place_of(tensor), 5, tuple(tensor.shape), table, row)
    assert np.any(table)  # some were finished on the way
    batch.flush()
    expected = [np.concatenate([of(tensor).numpy() for of in (MOMENTS.of, _late_tokens_of)]) for tensor in several]
    np.testing.assert_allclose(table[:, [*range(6), *range(8, 11)]], expected, rtol=1e-9, atol=1e-12)
