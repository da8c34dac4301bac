"""Any tensor as flat real entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keelscope.entries import blocks, constant, implicit_zeros, is_measurable, local_shard, stored


@pytest.mark.parametrize(
    ("tensor", "measurable"),
    [
        (torch.ones(2), True),
        (torch.ones(2, dtype=torch.float16), True),
        (torch.ones(2, dtype=torch.complex64), True),
        (torch.empty(0), True),
        (torch.ones(2).to(torch.float8_e4m3fn), True),
        (torch.ones(2, dtype=torch.int64), False),
        (torch.ones(2, dtype=torch.bool), False),
        (torch.ones(2, device="meta"), False),
    ],
)
def test_measurable(tensor, measurable):
    assert is_measurable(tensor) == measurable


def test_values_inside_transforms_are_not_measurable():
    seen = []
    torch.func.vmap(lambda x: (seen.append(is_measurable(x)), x)[1])(torch.ones(3))
    torch.func.grad(lambda x: (seen.append(is_measurable(x)), x.sum())[1])(torch.ones(3))
    assert seen == [False, False]


@given(order=st.permutations(range(4)), step=st.sampled_from([1, 2]), data=st.data())
def test_strided_entries_are_all_there(order, step, data):
    shape = data.draw(st.tuples(*[st.integers(0, 3)] * 4))
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape).permute(order)[::step]
    assert sorted(stored(x).tolist()) == sorted(x.reshape(-1).tolist())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_dense_permuted_tensors_are_read_in_place(order):
    x = torch.randn(3, 4, 5).permute(order)
    assert stored(x).data_ptr() == x.data_ptr()


def test_complex_and_conjugate():
    x = torch.tensor([[1 + 2j, 3 - 4j]])
    assert stored(x).tolist() == [1, 2, 3, -4]
    assert stored(x.conj()).tolist() == [1, -2, 3, 4]
    assert stored(x.mT).tolist() == [1, 2, 3, -4]


def test_sparse():
    x = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 5.0], (4,), check_invariants=True)
    assert stored(x).tolist() == [3, 5]
    assert implicit_zeros(x) == 2
    assert implicit_zeros(x.to_dense()) == 0
    assert implicit_zeros(x.to(torch.complex64)) == 4


def test_blocks_are_wide_and_private():
    x = torch.arange(10.0)
    for piece in blocks(x):
        assert piece.dtype == torch.float64
        piece.zero_()
    assert x.tolist() == list(range(10))
    wide = torch.arange(4, dtype=torch.float64)
    next(blocks(wide)).zero_()
    assert wide.tolist() == [0, 1, 2, 3]


def test_blocks_cover_long_vectors(monkeypatch):
    monkeypatch.setattr("keelscope.entries._CACHED_BLOCK", 7)
    pieces = list(blocks(torch.arange(40.0)))
    assert [len(piece) for piece in pieces] == [7] * 5 + [5]
    assert torch.cat(pieces).tolist() == list(range(40))


def test_local_shard_of_a_plain_tensor_is_itself():
    x = torch.ones(2)
    assert local_shard(x) is x


def test_constants_are_ordinary_tensors_wherever_they_are_first_made():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as mode:
        assert isinstance(torch.ones(1), FakeTensor)
        assert not is_measurable(mode.from_tensor(torch.ones(2)))
        made = constant(123456.5, torch.device("cpu"))
    assert type(made) is torch.Tensor
    assert made.item() == 123456.5
    with torch.inference_mode():
        assert not constant(123457.5, torch.device("cpu")).is_inference()
