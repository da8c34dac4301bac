from __future__ import annotations

import math
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import keelscope as ks
from keelscope import kernel, models
from keelscope.kernel import Routine
from keelscope.statistics import MOMENTS, SQUARES
from keelscope_probes.gradients import _late_tokens_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, -1e-40, 6e-8, 3e38, -65504.0, 1e25, 1e-25, 1.0]
LARGEST = 1e100  # beyond, sums of squares of float64 overflow in any order

compiled = pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel was not built")
dtypes = st.sampled_from(DTYPES)
numbers = st.one_of(st.floats(-1e3, 1e3, width=32), st.floats(-LARGEST, LARGEST), st.sampled_from(SPECIAL))
entries = st.lists(numbers, max_size=40)


def numbers_of(packed: bytes | None) -> np.ndarray:
    assert packed is not None
    return np.frombuffer(packed)


def run(routine, x):
    (found,) = kernel.measure_all(routine, [x])
    assert kernel.measure(kernel.program([("it", routine)]), x) == (None if found is None else {"it": found})
    return None if found is None else np.frombuffer(found)


def check_moments(x: torch.Tensor) -> None:
    got, expected = run(Routine.MOMENTS, x), MOMENTS.of(x).numpy()
    size = np.nan_to_num(expected[3], posinf=0.0)
    slack = np.array([0, size, len(x) * size**2, 0, 0, 0]) * 1e-13
    assert np.array_equal(np.isnan(got), np.isnan(expected)), (got, expected)
    assert np.array_equal(np.isinf(got), np.isinf(expected)), (got, expected)
    finite = np.isfinite(expected)
    assert np.array_equal(got[~finite], expected[~finite], equal_nan=True)
    gap = np.abs(got[finite] - expected[finite])
    assert np.all(gap <= slack[finite] + 1e-9 * np.abs(expected[finite])), (got, expected)
    assert np.array_equal(got[[0, 3, 4, 5]], expected[[0, 3, 4, 5]], equal_nan=True)


@compiled
@given(dtypes, entries, st.integers(1, 60))
@example(torch.float32, [], 1)
@example(torch.float32, [3.0], 1)
@example(torch.float16, [6e-8, -0.0, 65504.0], 1000)
@example(torch.bfloat16, [math.nan, 1.0], 700)
@example(torch.float64, [1e20, 1.0, 2.0], 500)
def test_moments_are_those_of_torch(dtype, values, repeats):
    check_moments(torch.tensor(values, dtype=torch.float64).to(dtype).repeat(repeats))


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 1023, 1024, 1025, 5000, 300_000])
def test_moments_of_random_numbers(dtype, count):
    check_moments((torch.randn(count, dtype=torch.float64) * 3 + 10).to(dtype))


@compiled
@pytest.mark.parametrize("count", [2, 7, 5000])
@pytest.mark.parametrize("size", [1e155, 1e250])
def test_squares_above_what_a_double_holds_are_infinite(count, size):
    x = torch.randn(count, dtype=torch.float64) * size
    got, expected = run(Routine.MOMENTS, x), MOMENTS.of(x).numpy()
    assert got[2] == expected[2] == math.inf
    assert got[[0, 1, 3, 4, 5]] == pytest.approx(expected[[0, 1, 3, 4, 5]], rel=1e-9)


@compiled
def test_no_precision_is_lost_to_a_large_mean_or_a_first_entry_far_away():
    noise = torch.randn(1 << 20, dtype=torch.float64)
    far = 1e6 + noise
    assert run(Routine.MOMENTS, far)[2] == pytest.approx(float((noise - noise.mean()).square().sum()), rel=1e-9)
    noise[0] = 1e10
    assert run(Routine.MOMENTS, noise)[2] == pytest.approx(float((noise - noise.mean()).square().sum()), rel=1e-9)
    assert run(Routine.MOMENTS, torch.full((5000,), 0.1))[2] == 0.0


@compiled
@pytest.mark.parametrize("bits", range(4))
def test_every_half_precision_number_is_read_right(bits):
    """A quarter of all bit patterns of both 16-bit types, NaN and infinities included."""
    patterns = torch.arange(bits * (1 << 14), (bits + 1) * (1 << 14), dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        for x in patterns.view(dtype).split(1 << 10):
            check_moments(x)
            expected = SQUARES.of(x).numpy()
            assert run(Routine.SQUARES, x) == pytest.approx(expected, rel=1e-12, nan_ok=True)


@compiled
@given(st.lists(st.tuples(dtypes, entries), max_size=5))
def test_squares_are_those_of_torch(many):
    tensors = [torch.tensor(values, dtype=torch.float64).to(dtype) for dtype, values in many]
    for got, x in zip(kernel.measure_all(Routine.SQUARES, tensors), tensors, strict=True):
        assert numbers_of(got) == pytest.approx(SQUARES.of(x).numpy(), rel=1e-9, nan_ok=True)


@compiled
@given(dtypes, st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.data())
def test_late_tokens_are_those_of_torch(dtype, batch, length, width, data):
    size = batch * length * width
    squarable = numbers.filter(lambda value: not 0 < abs(value) < 1 / LARGEST)
    values = data.draw(st.lists(st.one_of(st.just(0.0), squarable), min_size=size, max_size=size))
    x = torch.tensor(values, dtype=torch.float64).to(dtype).reshape(batch, length, width)
    got = run(Routine.LATE_TOKENS, x)
    assert got == pytest.approx(_late_tokens_of(x).numpy(), rel=1e-9, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 6).t(),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.complex64).conj().imag,
        torch.eye(3).to_sparse(),
        torch._efficientzerotensor(3),
        torch.ones(3, device="meta"),
        torch.ones(3).to(torch.float8_e4m3fn),
    ],
    ids=["transposed", "complex", "negated", "sparse", "unwritten", "meta", "float8"],
)
def test_other_tensors_are_left_to_torch(x):
    assert [run(routine, x) for routine in Routine] == [None] * len(Routine)


@compiled
def test_some_of_many_may_be_left_to_torch():
    plain, sparse = torch.ones(2), torch.eye(3).to_sparse()
    first, second, third = kernel.measure_all(Routine.SQUARES, [plain, sparse, plain * 2])
    assert (numbers_of(first).tolist(), second, numbers_of(third).tolist()) == ([2, 2], None, [2, 8])


@compiled
def test_what_has_no_tokens_is_left_to_torch():
    both = kernel.program([("moments", Routine.MOMENTS), ("tokens", Routine.LATE_TOKENS)])
    assert kernel.measure(both, torch.ones(2, 3)) is None
    assert kernel.measure(both, torch.ones(2, 0, 3)) is None
    assert set(kernel.measure(both, torch.ones(2, 1, 3))) == {"moments", "tokens"}


ODD = {
    "scalar": lambda: torch.tensor(2.0),
    "empty": lambda: torch.empty(0, 4),
    "empty with strides": lambda: torch.ones(4, 6)[:0, ::2],
    "one row of a slice": lambda: torch.arange(12.0).reshape(3, 4)[1],
    "columns": lambda: torch.arange(12.0).reshape(3, 4)[:, :2],
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "transposed, of one column": lambda: torch.arange(3.0).reshape(3, 1).T,
    "expanded": lambda: torch.ones(1).expand(3),
    "channels last": lambda: torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "inside a graph": lambda: torch.ones(3, requires_grad=True) * 2,
    "parameter": lambda: nn.Parameter(torch.ones(3)),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "integers": lambda: torch.ones(3, dtype=torch.int32),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "imaginary part of a conjugate": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
    "never written": lambda: torch._efficientzerotensor(3),
    "without memory": lambda: torch.ones(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@compiled
@pytest.mark.parametrize("name", ODD)
def test_a_tensor_is_found_alike_through_the_exchange_interface_and_by_its_attributes(name):
    """The second is what a torch without the first gets."""
    fixed = (torch.Tensor, nn.Parameter, torch.strided)
    program, tensor = kernel.program([("it", Routine.MOMENTS)]), ODD[name]()
    told = kernel.measure(program, tensor)
    try:
        assert kernel._native.prepare(*fixed, None, *DTYPES) is False
        asked = kernel.measure(program, tensor)
    finally:
        assert kernel._native.prepare(*fixed, torch.Tensor.__dlpack_c_exchange_api__, *DTYPES) is True
    assert told == asked
    if told is not None:
        assert np.allclose(numbers_of(told["it"]), MOMENTS.of(tensor.detach()).numpy())


@compiled
@given(st.integers(0, 40), st.sampled_from([math.nan, math.inf, -math.inf]), dtypes)
def test_squares_with_an_entry_that_is_not_finite_anywhere(place, entry, dtype):
    x = torch.linspace(-2, 2, 41, dtype=dtype)
    x[place] = entry
    expected = SQUARES.of(x).numpy()
    assert np.array_equal(run(Routine.SQUARES, x), expected, equal_nan=True)


@compiled
def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="a tuple, and a tensor"):
        kernel._native.measure(0, torch.ones(1))
    with pytest.raises(TypeError, match="a list of tensors"):
        kernel._native.measure_all(0, torch.ones(1))
    with pytest.raises(ValueError, match="no routine has the number 9"):
        kernel._native.measure_all(9, [torch.ones(1)])
    with pytest.raises(TypeError, match="expected 8 arguments, got 0"):
        kernel._native.prepare()
    assert kernel.measure_all(Routine.MOMENTS, [1.0]) == [None]


def record(folder, name):
    torch.manual_seed(0)
    model = models.build("post_ln", depth=4, width=16, heads=2, vocabulary=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ks.watch(model, folder / name, optimizer=optimizer, probes=("default", "sublayers")) as session:
        for _ in range(2):
            tokens = torch.randint(0, 32, (2, 9))
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return ks.open_run(session.path)


@compiled
def test_a_run_has_the_same_numbers_without_the_kernel(tmp_path, monkeypatch):
    fast = record(tmp_path, "fast.h5")
    monkeypatch.setattr(kernel, "_native", None)
    slow = record(tmp_path, "slow.h5")
    names = [name for name in list(fast.keys()) if "/" in name and not name.startswith("scalars/")]
    assert len(names) > 20
    for name in names:
        assert np.allclose(fast[name].values, slow[name].values, rtol=1e-6, atol=1e-12, equal_nan=True), name


def test_the_environment_turns_it_off():
    code = "from keelscope import kernel; print(kernel.is_compiled())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"KEELSCOPE_KERNEL": "torch"}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("native", [kernel._native, None])
def test_identities_are_those_of_the_objects_and_their_order(native, monkeypatch):
    monkeypatch.setattr(kernel, "_native", native)
    one, other = [object()], [object()]
    assert kernel.identities([one, other]) == kernel.identities([one, other])
    assert kernel.identities([one, other]) not in (kernel.identities([other, one]), kernel.identities([one]))
    assert len(kernel.identities([one] * 100)) == 800
    assert kernel.identities([]) == b""
    for these in ([], [one], [one, other], [other, one], [one, other, one]):
        for those in ([], [one], [one, other], [other, one], [one, other, one]):
            assert kernel.are_identities(these, kernel.identities(those)) == (these == those)


@pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel was not built")
def test_a_tree_that_only_python_can_tell():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._modules = OrderedDict()

    assert kernel.tree_of([nn.Linear(1, 1)]) is not None
    assert kernel.tree_of([nn.Linear(1, 1), Odd()]) is None
    assert kernel.tree_of([1]) is None
    packed = kernel.tree_of([nn.Linear(1, 1)])
    assert kernel.is_tree([Odd()], packed) is None
    assert kernel.is_tree([1], packed) is None


@pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel was not built")
def test_a_tree_is_the_same_while_nothing_came_went_or_was_replaced():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.ReLU()))
    modules = list(net.modules())
    packed = kernel.tree_of(modules)
    assert kernel.is_tree(modules, packed)
    changed = [
        lambda: setattr(net[0], "bias", None),
        lambda: net[2].append(nn.Tanh()),
        lambda: net[1].register_parameter("bias", None),
    ]
    for change in changed:
        change()
        assert kernel.is_tree(modules, packed) is False
        packed = kernel.tree_of(modules)
        assert kernel.is_tree(modules, packed)
    assert kernel.is_tree(modules[:-1], packed) is False
    assert kernel.is_tree(modules, packed[:-8]) is False
    assert kernel.is_tree(modules, ([], [], [], [])) is None
