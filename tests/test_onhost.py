"""Tensors in host memory, read by numpy where they lie."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keelscope.onhost import entries_at, narrowed, place_of, words_at

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.Tensor.clone, nn.Parameter], ids=["tensor", "parameter"])
def test_entries_are_those_of_the_tensor(dtype, kind):
    tensor = kind(torch.tensor([[1.0, -2.5, 0.0], [float("inf"), 3e-5, 1e-8]], dtype=torch.float64).to(dtype))
    place = place_of(tensor)
    assert place is not None
    assert narrowed(entries_at(place)).tolist() == tensor.double().flatten().tolist()


def test_the_memory_is_shared_and_stays_as_free_as_it_was():
    tensor = torch.zeros(2)
    entries = entries_at(place_of(tensor))
    tensor[1] = 7.0
    assert entries.tolist() == [0.0, 7.0]
    tensor.untyped_storage().resize_(0)  # as FSDP does; refused after Tensor.numpy()


@pytest.mark.parametrize("start", range(4))
def test_entries_may_begin_at_any_byte(start):
    raw = bytearray(start) + torch.tensor([1.0, -2.5]).numpy().tobytes()
    place = place_of(torch.frombuffer(raw, dtype=torch.float32, offset=start))
    floats, words = words_at(*place[:2])
    assert entries_at(place).tolist() == floats.tolist() == [1.0, -2.5]
    assert [hex(word) for word in words] == ["0x3f800000", "0xc0200000"]


def test_a_tensor_without_entries_has_a_place():
    assert entries_at(place_of(torch.ones(0, 3))).tolist() == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 6).t(),
        torch.ones(3, dtype=torch.complex64),
        torch._neg_view(torch.ones(3)),
        torch.eye(3).to_sparse(),
        torch._efficientzerotensor(3),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.int64),
        torch.ones(3).as_subclass(type("Other", (torch.Tensor,), {})),
    ],
    ids=["transposed", "complex", "negated", "sparse", "unwritten", "meta", "whole numbers", "subclass"],
)
def test_other_tensors_are_left_to_torch(tensor):
    assert place_of(tensor) is None
