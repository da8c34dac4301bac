"""Closed-form norm Jacobians against dense float64 Jacobians from autograd."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from keelscope.jacobian.closed_forms import frobenius_gain, row_gains, transported_squares, vector_jacobian
from keelscope.jacobian.norms import NormForm, fold, normalise, unfold
from keelscope.jacobian.recognition import recognise
from keelscope.jacobian.spectrum import sigma_max

EPSILONS = (0.0, 1e-6, 1e-5)
SCALES = (1.0, 1e-1, 1e-2, 1e-3)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gain(kind: str, d: int) -> Tensor:
    gamma = 1 + 0.3 * drawn(d, seed=1)
    if kind == "outlier":
        gamma[0] = 50.0
    elif kind == "sparse":
        gamma = gamma * (torch.arange(d) % 2 == 0) + 1e-3
    return torch.ones(d, dtype=torch.float64) if kind == "ones" else gamma


def made(kind: str, d: int, gamma: Tensor, eps: float) -> nn.Module:
    module = nn.LayerNorm(d, eps=eps) if kind == "layer" else nn.RMSNorm(d, eps=eps)
    module.double()
    with torch.no_grad():
        module.weight.copy_(gamma)
        if kind == "layer":
            module.bias.copy_(drawn(d, seed=2))
    return module


def rows_of(d: int, scale: float, *, constant: bool) -> Tensor:
    """Two ordinary rows, one with an outlier in the place of the outlier gain, and perhaps a constant one."""
    x = scale * drawn(4 if constant else 3, d, seed=d)
    x[2, 0] = 30 * scale
    if constant:
        x[3] = 0.7 * scale
    return x


def dense(module: nn.Module, x: Tensor) -> Tensor:
    """Jacobian of each row by itself, ``[row, output, input]``."""
    return torch.stack([jacobian(module, row, vectorize=True) for row in x])


def assert_near(got: Tensor, want: Tensor, size: Tensor) -> None:
    """To 1e-9 of itself, and to rounding of ``max|gamma| / s`` where next to nothing is left."""
    error = (got - want).abs()
    assert (error <= 1e-9 * want.abs() + 1e-14 * size).all(), (error / want.abs()).max()


def check_rows(module: nn.Module, x: Tensor) -> None:
    form = recognise(module)
    assert form is not None
    truth = dense(module, x)
    size = module.weight.detach().abs().max() * row_gains(form, x).scale
    assert_near(frobenius_gain(form, x) * x.shape[1] ** 0.5, torch.linalg.matrix_norm(truth), size)
    exact = torch.linalg.matrix_norm(truth, ord=2)
    assert_near(sigma_max(form, x), exact, size)
    assert (row_gains(form, x).sigma_max >= exact * (1 - 1e-12) - 1e-14 * size).all()
    gradient = drawn(*x.shape, seed=1000)
    want = torch.einsum("ro,roi->ri", gradient, truth)
    got = vector_jacobian(form, x, gradient)
    length = gradient.norm(dim=1)
    assert_near((got - want).norm(dim=1), torch.zeros_like(length), 1e2 * size * length)
    after, before = transported_squares(form, x, gradient)
    torch.testing.assert_close(before, gradient.square().sum(1))
    assert_near(after, want.square().sum(1), (size * length).square())


@pytest.mark.parametrize("gamma", ["ones", "random", "outlier", "sparse"])
@pytest.mark.parametrize("d", [1, 2, 3, 64])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_rows(kind, d, gamma):
    for eps, scale in itertools.product(EPSILONS, SCALES):
        if kind == "layer" and d == 1 and eps == 0:
            continue  # 0 / 0: autograd says NaN
        check_rows(made(kind, d, gain(gamma, d), eps), rows_of(d, scale, constant=eps > 0))


@pytest.mark.parametrize(
    ("gamma", "eps", "scale"), [("random", 1e-5, 1e-3), ("outlier", 1e-6, 1.0), ("ones", 0.0, 1.0)]
)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_wide_rows(kind, gamma, eps, scale):
    check_rows(made(kind, 1024, gain(gamma, 1024), eps), rows_of(1024, scale, constant=eps > 0)[2:])


def test_constant_row_is_capped_by_epsilon():
    form = NormForm("layer", eps=1e-5, shape=(8,))
    gains = row_gains(form, torch.full((1, 8), 3.0))
    assert gains.sigma_max.item() == pytest.approx(1e-5**-0.5)
    assert gains.squared_gain.item() == pytest.approx(7 / 8 * 1e5)
    assert gains.epsilon_share.item() == pytest.approx(1)


def test_unit_gain_has_the_singular_values_of_a_projection():
    """1/s for all directions but the row (eps / s^3) and the mean (0)."""
    x, eps = drawn(1, 16), 1e-2
    for kind, lost in (("layer", 2), ("rms", 1)):
        form = NormForm(kind, eps=eps, shape=(16,))
        m = (x.var(correction=0) if kind == "layer" else x.square().mean()).item()
        s = (m + eps) ** 0.5
        want = ((16 - lost) / s**2 + (eps / s**3) ** 2) / 16
        assert row_gains(form, x).squared_gain.item() == pytest.approx(want, rel=1e-12)
        assert sigma_max(form, x).item() == pytest.approx(1 / s, rel=1e-12)


def test_gradient_at_the_input_is_across_the_row():
    x, g = drawn(5, 32, seed=1), drawn(5, 32, seed=2)
    form = NormForm("layer", gamma=gain("random", 32), eps=1e-5, shape=(32,))
    at_input = vector_jacobian(form, x, g)
    c = x - x.mean(1, keepdim=True)
    cosine = torch.nn.functional.cosine_similarity(at_input, c)
    assert cosine.abs().max() < 1e-4
    torch.testing.assert_close(at_input.sum(1), torch.zeros(5, dtype=torch.float64), atol=1e-13, rtol=0)


@pytest.mark.parametrize("d", [2, 3, 64])
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_gradient_along_the_row_is_left_to_epsilon(kind, d):
    """J' u = eps / s^3 u for gamma = 1, however little that is."""
    x, eps = drawn(4, d, seed=1), 1e-5
    form = NormForm(kind, eps=eps, shape=(d,))
    u = x - x.mean(1, keepdim=True) if kind == "layer" else x
    want = row_gains(form, x).epsilon_share * row_gains(form, x).scale
    after, before = transported_squares(form, x, u)
    torch.testing.assert_close((after / before).sqrt(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(vector_jacobian(form, x, u).norm(dim=1) / u.norm(dim=1), want, rtol=1e-9, atol=0)


def test_what_epsilon_lets_through_is_exact():
    """eps / s^3 where the norm takes all other directions: 1e-9 of gamma / s, beyond the digits of autograd."""
    eps = 1e-9
    one, two = drawn(4, 1, seed=1), drawn(4, 2, seed=1)
    rms = NormForm("rms", gamma=torch.tensor([3.0]), eps=eps, shape=(1,))
    layer = NormForm("layer", gamma=torch.tensor([3.0, 1.0]), eps=eps, shape=(2,))
    want = 3 * eps / (one[:, 0].square() + eps) ** 1.5
    for got in (frobenius_gain(rms, one), sigma_max(rms, one), row_gains(rms, one).sigma_max):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    want = 5**0.5 * eps / ((two[:, 0] - two[:, 1]).square() / 4 + eps) ** 1.5
    for got in (frobenius_gain(layer, two) * 2**0.5, sigma_max(layer, two), row_gains(layer, two).sigma_max):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


def norm_with(module: nn.Module) -> nn.Module:
    """Random gains and running statistics, in float64."""
    module.double()
    with torch.no_grad():
        for i, tensor in enumerate([*module.parameters(), *module.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(0.5 + drawn(*tensor.shape, seed=i).abs())
    return module


class Unbiased(nn.Module):
    """(x - mean) / (std + eps) with n - 1 in std."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(d)), 1e-2

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)


class Length(nn.Module):
    """g x / max(|x|, floor)."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.tensor(2.0)), floor

    def forward(self, x: Tensor) -> Tensor:
        return self.g * torch.nn.functional.normalize(x, dim=-1, eps=self.eps)


class Saturating(nn.Module):
    """gamma tanh(a x) + beta."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.gamma, self.beta = (nn.Parameter(torch.ones(n)) for n in (1, d, d))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * torch.tanh(self.a * x) + self.beta


class ChannelFirst(nn.Module):
    """LayerNorm over dimension 1."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x.movedim(1, -1), (x.shape[1],), self.weight, None, 1e-3).movedim(-1, 1)


OTHERS = {
    "layer over two dimensions": (lambda: nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer without gain": (lambda: nn.LayerNorm(6, elementwise_affine=False), (3, 6)),
    "rms with machine epsilon": (lambda: nn.RMSNorm(6), (3, 6)),
    "unbiased layer": (lambda: Unbiased(6), (2, 3, 6)),
    "scale": (lambda: Length(1e-3), (3, 6)),
    "scale below its floor": (lambda: Length(1e3), (3, 6)),
    "channel first": (lambda: ChannelFirst(4), (2, 4, 3)),
    "group": (lambda: nn.GroupNorm(2, 6), (3, 6, 2, 2)),
    "group of one channel each": (lambda: nn.GroupNorm(6, 6), (3, 6, 2)),
    "group of all channels": (lambda: nn.GroupNorm(1, 6), (2, 6, 2)),
    "group without places": (lambda: nn.GroupNorm(2, 6), (4, 6)),
    "group of two entries": (lambda: nn.GroupNorm(3, 6), (4, 6)),
    "instance": (lambda: nn.InstanceNorm1d(4, affine=True), (3, 4, 5)),
    "instance in evaluation": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(), (3, 4, 5)),
    "batch": (lambda: nn.BatchNorm2d(3), (4, 3, 2, 2)),
    "batch of tokens": (lambda: nn.BatchNorm1d(5), (6, 5)),
    "batch of two": (lambda: nn.BatchNorm1d(5), (2, 5)),
    "batch without gain": (lambda: nn.BatchNorm1d(5, affine=False), (6, 5)),
    "batch without running statistics": (lambda: nn.BatchNorm1d(5, track_running_stats=False).eval(), (6, 5)),
    "batch in evaluation": (lambda: nn.BatchNorm2d(3).eval(), (4, 3, 2, 2)),
    "dyt": (lambda: Saturating(5), (2, 3, 5)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whole_inputs(name):
    """The Jacobian of the whole input is block diagonal over rows: its Frobenius norm, top value and products."""
    build, shape = OTHERS[name]
    module, x, g = norm_with(build()), drawn(*shape, seed=5), drawn(*shape, seed=6)
    form = recognise(module)
    assert form is not None
    assert form.accepts(x)
    torch.testing.assert_close(normalise(form, x), module(x).detach(), rtol=1e-9, atol=1e-12)
    truth = jacobian(module, x).reshape(x.numel(), x.numel())
    entries = x.numel() / len(row_gains(form, x).table)
    frobenius = (row_gains(form, x).squared_gain.sum() * entries).sqrt()
    torch.testing.assert_close(frobenius, truth.norm(), rtol=1e-9, atol=0)
    top = torch.linalg.matrix_norm(truth, ord=2)
    torch.testing.assert_close(sigma_max(form, x).amax(), top, rtol=1e-9, atol=0)
    assert row_gains(form, x).sigma_max.amax() >= top * (1 - 1e-12)
    want = (g.reshape(-1) @ truth).reshape(shape)
    torch.testing.assert_close(vector_jacobian(form, x, g), want, rtol=1e-9, atol=1e-10)
    after, before = transported_squares(form, x, g)
    torch.testing.assert_close(after.sum().sqrt(), want.norm(), rtol=1e-9, atol=0)
    torch.testing.assert_close(before.sum().sqrt(), g.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_rows_go_back_to_their_places(name):
    build, shape = OTHERS[name]
    x, form = drawn(*shape), recognise(norm_with(build()))
    assert torch.equal(unfold(form, fold(form, x), x), x)


@pytest.mark.parametrize("name", OTHERS)
def test_pieces_do_not_change_the_result(name, monkeypatch):
    build, shape = OTHERS[name]
    form, x, g = recognise(norm_with(build())), drawn(*shape), drawn(*shape, seed=1)
    whole = row_gains(form, x).table, *transported_squares(form, x, g), sigma_max(form, x)
    monkeypatch.setattr("keelscope.jacobian.rowsums._CACHED_PIECE", 7)
    monkeypatch.setattr("keelscope.jacobian.spectrum._PIECE", 7)
    pieces = row_gains(form, x).table, *transported_squares(form, x, g), sigma_max(form, x)
    for got, want in zip(pieces, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", OTHERS)
def test_tensors_and_arrays_agree(name, monkeypatch):
    """On the CPU the last steps are numpy's; elsewhere they are torch's."""
    build, shape = OTHERS[name]
    form, x, g = recognise(norm_with(build())), drawn(*shape), drawn(*shape, seed=1)
    arrays = row_gains(form, x).table, *transported_squares(form, x, g)
    monkeypatch.setattr("keelscope.jacobian.closed_forms.numbers", lambda values: values)
    tensors = row_gains(form, x).table, *transported_squares(form, x, g)
    for got, want in zip(tensors, arrays, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_are_computed_wide(dtype):
    """Values and squares that leave the range of the type, and inputs left as they were."""
    x = (300 * drawn(4, 64)).to(dtype)
    g = drawn(4, 64, seed=1).to(dtype)
    before = x.clone()
    form = NormForm("layer", gamma=gain("random", 64).to(dtype), eps=1e-5, shape=(64,))
    wide = NormForm("layer", gamma=gain("random", 64).to(dtype).double(), eps=1e-5, shape=(64,))
    torch.testing.assert_close(row_gains(form, x).table, row_gains(wide, x.double()).table, rtol=1e-12, atol=0)
    got, want = transported_squares(form, x, g), transported_squares(wide, x.double(), g.double())
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    assert vector_jacobian(form, x, g).dtype == dtype
    assert torch.equal(x, before)


def test_inputs_of_float64_are_not_written_to():
    for kind in ("layer", "rms"):
        form = NormForm(kind, gamma=gain("random", 8), eps=1e-5, shape=(8,))
        x, g = drawn(3, 8), drawn(3, 8, seed=1)
        x_before, g_before = x.clone(), g.clone()
        row_gains(form, x), transported_squares(form, x, g), sigma_max(form, x), vector_jacobian(form, x, g)
        assert torch.equal(x, x_before)
        assert torch.equal(g, g_before)


def test_strided_inputs():
    x, g = drawn(8, 6, 4, seed=1), drawn(8, 6, 4, seed=2)
    form = NormForm("layer", gamma=gain("random", 4), eps=1e-5, shape=(4,))
    want = row_gains(form, x).table, *transported_squares(form, x, g)
    laid = [t.permute(2, 0, 1).contiguous().permute(1, 2, 0) for t in (x, g)]
    got = row_gains(form, laid[0]).table, *transported_squares(form, *laid)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)
    flat = torch.ones(1, 1, 1, dtype=torch.float64).expand(8, 6, 4)
    torch.testing.assert_close(transported_squares(form, x, flat), transported_squares(form, x, flat.clone()))


def test_undefined_rows_are_not_hidden():
    form = NormForm("rms", shape=(3,))
    gains = row_gains(form, torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 2.0], [float("nan"), 0.0, 1.0]]))
    assert gains.squared_gain.isfinite().tolist() == [False, True, False]
