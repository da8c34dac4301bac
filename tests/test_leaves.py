"""Tensors in nested containers, with their paths."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from keelscope.leaves import Handles, floating_leaves, hook_gradient
from keelscope.unwinding import Breaks

Point = namedtuple("Point", "x y")
KEYS = st.text(alphabet="abc", min_size=1, max_size=3)


@dataclasses.dataclass
class Record:
    a: object
    b: object


def build(tree):
    """A tree of lists and dicts with numbers as leaves, as tensors; what the walk should find, by plain recursion."""
    if isinstance(tree, int):
        tensor = torch.tensor(float(tree)) if tree % 3 else torch.tensor(tree)
        return tensor, [("", tensor)] if tree % 3 else []
    items = list(tree.items()) if isinstance(tree, dict) else [(str(i), child) for i, child in enumerate(tree)]
    built = [(key, *build(child)) for key, child in items]
    found = [(f"{key}.{path}" if path else key, leaf) for key, _, leaves in built for path, leaf in leaves]
    values = [value for _, value, _ in built]
    return (dict(zip([key for key, _, _ in built], values, strict=True)) if isinstance(tree, dict) else values), found


@given(
    st.recursive(
        st.integers(1, 9), lambda t: st.lists(t, max_size=3) | st.dictionaries(KEYS, t, max_size=3), max_leaves=8
    )
)
def test_any_nesting(tree):
    value, wanted = build(tree)
    found = floating_leaves(value)
    assert [path for path, _ in found] == [path for path, _ in wanted]
    assert all(a is b for (_, a), (_, b) in zip(found, wanted, strict=True))


def test_containers():
    x = torch.ones(2)
    cases = {
        "tuple": ((x, 1), ["0"]),
        "namedtuple": (Point(None, x), ["1"]),
        "mapping": (UserDict(h=x), ["h"]),
        "ordered": (OrderedDict([("b", x), ("a", x)]), ["b", "a"]),
        "dataclass": (Record(x, [x]), ["a", "b.0"]),
        "integer keys": ({3: x}, ["3"]),
        "packed": (pack_sequence([torch.ones(3, 1), torch.ones(2, 1)]), ["data"]),
    }
    for kind, (value, wanted) in cases.items():
        assert [path for path, _ in floating_leaves(value)] == wanted, kind


def test_what_is_no_number_is_left_out():
    kinds = [
        torch.arange(2),
        torch.tensor([True]),
        torch.empty(2, device="meta"),
        None,
        "text",
        3.0,
        object(),
        Record,
        {1, 2},
    ]
    assert floating_leaves(kinds) == []
    assert (
        len(floating_leaves([torch.ones(1).half(), torch.ones(1).bfloat16(), torch.ones(1, dtype=torch.complex64)]))
        == 3
    )


def test_a_container_that_holds_itself_ends():
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    assert floating_leaves(loop)[0][0] == "0"


def test_a_dataclass_with_a_missing_field():
    record = Record(torch.ones(1), None)
    del record.b
    assert [path for path, _ in floating_leaves(record)] == ["a"]


def test_gradient_hooks_are_called_in_turn_with_those_of_others():
    x = torch.ones(2, requires_grad=True)
    hidden, seen = x * 2, []
    hidden.register_hook(lambda gradient: seen.append(("before", gradient.tolist())))
    assert hook_gradient(hidden, lambda gradient: seen.append(("first", gradient.tolist())), Breaks()) is None
    other = hidden * 3
    assert hook_gradient(other, lambda gradient: seen.append(("alone", gradient.tolist())), Breaks()) is None
    assert hook_gradient(other, lambda gradient: seen.append(("second", gradient.tolist())), Breaks()) is None
    other.register_hook(lambda gradient: seen.append(("after", gradient.tolist())))
    other.sum().backward()
    assert [name for name, _ in seen] == ["alone", "second", "after", "before", "first"]
    assert [value for _, value in seen] == [[1, 1]] * 3 + [[3, 3]] * 2


def test_a_gradient_hook_on_a_leaf_can_be_taken_off():
    x, seen = torch.ones(2, requires_grad=True), []
    handle = hook_gradient(x, seen.append, Breaks())
    x.sum().backward()
    handle.remove()
    x.sum().backward()
    assert len(seen) == 1


def test_gradient_hooks_on_the_output_of_a_function_of_ones_own():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    seen = []
    y = Double.apply(torch.ones(2, requires_grad=True))
    hook_gradient(y, seen.append, Breaks())
    y.sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[1, 1]]


def test_handles_are_given_back_together():
    tensor, seen, handles = torch.ones(1, requires_grad=True), [], Handles()
    for name in "ab":
        handles.append(tensor.register_hook(lambda _, name=name: seen.append(name)))
    (tensor * 2).backward()
    handles.close()
    handles.close()
    (tensor * 2).backward()
    assert (seen, len(handles)) == (["a", "b"], 0)
