"""Norms known by what they compute: user classes, library classes, and what only looks like a norm."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keelscope.jacobian.closed_forms import vector_jacobian
from keelscope.jacobian.norms import normalise
from keelscope.jacobian.recognition import Recogniser, recognise
from keelscope.models.norms import ScaleNorm
from keelscope.models.schemes.branch_norms import DynamicTanh


class Vector(nn.Module):
    """A module with one vector, and what it makes of it."""

    def __init__(self, d: int, start: float = 1.0) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.full((d,), start))


class HardCoded(Vector):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.g


class OnePlus(Vector):
    def __init__(self, d: int) -> None:
        super().__init__(d, start=0.0)
        self.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.g)


class RootPlusEpsilon(Vector):
    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.epsilon = 1e-2

    def forward(self, x: Tensor) -> Tensor:
        return self.g * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon)


class Unbiased(Vector):
    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.b, self.eps = nn.Parameter(torch.zeros(d)), 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return self.g * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b


class Lengthwise(Vector):
    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.scale = d**0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * self.g


class UnitLength(Vector):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.g


class MachineEpsilon(Vector):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],)) * self.g


class BareNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), eps=1e-4)


class FixedScaleNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.scale = d**0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale


class DeclaredWidthNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.normalized_shape = (d,)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.normalized_shape, None, None, 1e-5).to(x.dtype)


class ChannelFirst(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(1, d, 1)), nn.Parameter(torch.zeros(1, d, 1))

    def forward(self, x: Tensor) -> Tensor:
        _batch, _channels, _time = x.shape  # three dimensions, no other number
        gap = x - x.mean(1, keepdim=True)
        return gap / (gap.square().mean(1, keepdim=True) + 1e-4).sqrt() * self.gamma + self.beta


class WideLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


class WideGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


class ShiftedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Renamed(nn.BatchNorm2d):
    """Nothing of its own."""


KNOWN = {
    "hard-coded epsilon in float32": (lambda: HardCoded(8), "rms", (2, 3, 8)),
    "gain 1 + weight": (lambda: OnePlus(8), "rms", (2, 3, 8)),
    "epsilon outside the root": (lambda: RootPlusEpsilon(8), "rms", (2, 3, 8)),
    "unbiased": (lambda: Unbiased(8), "layer", (2, 3, 8)),
    "root of the width in the code": (lambda: Lengthwise(8), "rms", (2, 3, 8)),
    "length with a gain each": (lambda: UnitLength(8), "scale", (2, 3, 8)),
    "machine epsilon": (lambda: MachineEpsilon(8), "rms", (2, 3, 8)),
    "without parameters": (BareNorm, "layer", (2, 3, 9)),
    "constant length": (lambda: FixedScaleNorm(8), "scale", (2, 3, 8)),
    "declared width": (lambda: DeclaredWidthNorm(8), "layer", (2, 3, 8)),
    "channel first": (lambda: ChannelFirst(8), "layer", (2, 8, 3)),
    "layer norm in float32": (lambda: WideLayerNorm(8), "layer", (2, 3, 8)),
    "group norm in float32": (lambda: WideGroupNorm(2, 8), "group", (2, 8, 3)),
    "layer norm with another gain": (lambda: ShiftedLayerNorm(8), "layer", (2, 3, 8)),
    "inherited": (lambda: Renamed(4), "batch", (2, 4, 3, 3)),
    "of the reference models: scale": (lambda: ScaleNorm(8), "scale", (2, 3, 8)),
    "of the reference models: dyt": (lambda: DynamicTanh(8, 0.5), "dyt", (2, 3, 8)),
}


def randomised(module: nn.Module) -> nn.Module:
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.5 + torch.rand(parameter.shape, generator=draw))
    return module


def assert_closed_form(module: nn.Module, shape: tuple[int, ...], *, rtol: float = 1e-4) -> None:
    """Outputs and input gradients as the module itself computes them, at sizes with and without epsilon."""
    draw = torch.Generator().manual_seed(11)
    for size in (1.0, 1e-2, 1e-4):
        x = (size * torch.randn(shape, generator=draw)).requires_grad_()
        g = torch.randn(shape, generator=draw)
        form = recognise(module)
        assert form is not None
        assert form.accepts(x)
        y = module(x)
        torch.testing.assert_close(normalise(form, x.detach()).float(), y.detach(), rtol=rtol, atol=1e-5)
        (want,) = torch.autograd.grad(y, x, g)
        got = vector_jacobian(form, x.detach(), g)
        assert (got - want).norm() <= rtol * want.norm()


@pytest.mark.parametrize("name", KNOWN)
def test_known(name):
    build, kind, shape = KNOWN[name]
    module = randomised(build())
    form = recognise(module)
    assert form is not None
    assert form.kind == kind
    assert_closed_form(module, shape)


@pytest.mark.parametrize("width", [3, 64, 768, 4096])
def test_any_width(width):
    for build in (HardCoded, OnePlus, Unbiased, Lengthwise, ShiftedLayerNorm, lambda d: DynamicTanh(d, 0.5)):
        assert_closed_form(randomised(build(width)), (2, 2, width))


TORCH = {
    "layer": nn.LayerNorm((3, 4)),
    "rms": nn.RMSNorm(8),
    "group": nn.GroupNorm(2, 6),
    "instance": nn.InstanceNorm2d(4),
    "batch": nn.BatchNorm1d(4),
    "batch_eval": nn.BatchNorm3d(4).eval(),
}


@pytest.mark.parametrize("kind", TORCH)
def test_torch(kind):
    assert recognise(TORCH[kind]).kind == kind


def test_torch_classes_are_not_tried_out(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("keelscope.jacobian.recognition.fit", fail)
    monkeypatch.setattr("keelscope.jacobian.recognition.agrees", fail)
    weighted = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    for module in (*TORCH.values(), nn.Linear(3, 3), nn.PReLU(3), nn.Softmax(-1), nn.Sequential(nn.ReLU()), weighted):
        recognise(module)


class Gated(Vector):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return F.rms_norm(x if gate is None else x * gate, (x.shape[-1],), self.g, 1e-6)


class TwoGains(Vector):
    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.h = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.g * self.h, 1e-6)


class LayerScale(Vector):
    def forward(self, x: Tensor) -> Tensor:
        return self.g * x


class Bounded(Vector):
    def forward(self, x: Tensor) -> Tensor:
        return self.g * x / (1 + x.abs())


class AbsoluteNorm(Vector):
    def forward(self, x: Tensor) -> Tensor:
        return self.g * x / x.abs().mean(-1, keepdim=True)


class SoftmaxNorm(Vector):
    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.g * x, -1)


class NormThenGelu(Vector):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, (x.shape[-1],), self.g))


class DetachedNorm(Vector):
    """Equal in value, but a norm all the same: what is recognised is the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.g, 1e-6)[..., :-1]


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x @ self.weight, (4,))


class FailingNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError(x)


@pytest.mark.parametrize(
    "module",
    [
        Gated(8),
        TwoGains(8),
        LayerScale(8),
        Bounded(8),
        AbsoluteNorm(8),
        SoftmaxNorm(8),
        NormThenGelu(8),
        DetachedNorm(8),
        Projected(),
        FailingNorm(),
        nn.Sequential(nn.LayerNorm(4)),
        nn.Linear(4, 4),
        nn.LocalResponseNorm(2),
        nn.Identity(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_unknown(module):
    assert recognise(randomised(module)) is None


class Busy(HardCoded):
    """Writes wherever a forward can write, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__(8)
        self.calls: list[int] = []
        self.count = 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        self.count += 1
        self.seen += 1
        torch.rand(3)
        return super().forward(x)


def test_the_module_is_left_alone():
    module = randomised(Busy())
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    hooked: list[str] = []
    module.register_forward_hook(lambda *_: hooked.append("after"))
    module.register_forward_pre_hook(lambda *_: hooked.append("before"))
    assert recognise(module).kind == "rms"
    assert hooked == []
    assert module.calls == []
    assert module.count == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.g.requires_grad
    assert module.g.grad is None


def test_forms_follow_the_module():
    recogniser = Recogniser()
    norm = OnePlus(4)
    assert recogniser.form(norm).gamma.tolist() == [1, 1, 1, 1]
    with torch.no_grad():
        norm.g += 0.5
    norm.eps = 0.25
    assert recogniser.form(norm).gamma.tolist() == [1.5, 1.5, 1.5, 1.5]
    assert recogniser.form(norm).eps == 0.25
    batch = nn.BatchNorm1d(4)
    assert [recogniser.form(batch.train(mode)).kind for mode in (True, False)] == ["batch", "batch_eval"]


def test_gamma_is_the_parameter_where_it_can_be():
    """Roots of the width go into the unit of the scale."""
    for module in (UnitLength(8), Lengthwise(8), ScaleNorm(8), HardCoded(8)):
        (parameter,) = randomised(module).parameters()
        torch.testing.assert_close(recognise(module).gamma, parameter.detach())


def test_machine_epsilon_depends_on_the_input():
    """What torch does: float32 for every narrower type."""
    for module in (nn.RMSNorm(4), MachineEpsilon(4)):
        form = recognise(module)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = torch.full((4,), 1e-5, dtype=dtype)
            y = F.rms_norm(x, (4,)).double()
            wide = x.double()
            assert form.epsilon(dtype) == pytest.approx(((wide / y) ** 2 - wide**2)[0].item(), rel=2e-2)
        assert form.epsilon(torch.float64) == pytest.approx(torch.finfo(torch.float64).eps, rel=1e-3)


def test_epsilon_is_exact():
    assert recognise(HardCoded(8)).eps == 1e-6
    assert recognise(RootPlusEpsilon(8)).eps == 1e-2
    assert recognise(Unbiased(8)).eps == pytest.approx(1e-3 * math.sqrt(7 / 8), rel=1e-9)
    assert recognise(ScaleNorm(8, eps=0.5)).eps == 0.5


def test_modules_alike_are_tried_out_once(monkeypatch):
    calls = []
    forward = HardCoded.forward

    def counted(self: HardCoded, x: Tensor) -> Tensor:
        calls.append(1)
        return forward(self, x)

    monkeypatch.setattr(HardCoded, "forward", counted)
    recogniser = Recogniser()
    assert recogniser.knows(HardCoded(8))
    first = len(calls)
    assert all(recogniser.knows(HardCoded(8)) for _ in range(50))
    assert len(calls) == first > 0
    assert recogniser.knows(HardCoded(16))
    assert len(calls) == 2 * first


def test_no_module_is_kept_alive():
    recogniser, norm = Recogniser(), HardCoded(8)
    recogniser.form(norm)
    gone = weakref.ref(norm)
    del norm
    gc.collect()
    assert gone() is None


def test_lazy_modules_wait():
    recogniser, lazy = Recogniser(), nn.LazyBatchNorm1d()
    assert recogniser.knows(lazy)
    lazy(torch.randn(4, 3))
    assert recogniser.form(lazy).shape == (3,)


def test_a_gain_that_lies_elsewhere_is_no_form():
    """Of a sharded parameter only a part is here, between the calls of the module."""
    recogniser, norm = Recogniser(), nn.LayerNorm(8)
    assert recogniser.form(norm) is not None
    norm.weight = nn.Parameter(torch.ones(4))
    assert recogniser.form(norm) is None


def test_a_shape_that_does_not_fit_is_refused():
    form = recognise(nn.LayerNorm(8))
    assert not form.accepts(torch.zeros(4, 7))
    assert not form.accepts(torch.zeros(0, 8))
    assert not form.accepts(torch.zeros(4, 8, dtype=torch.int64))
    assert not recognise(nn.InstanceNorm1d(4)).accepts(torch.zeros(4, 4)), "an unbatched input"
    assert recognise(nn.BatchNorm1d(4)).accepts(torch.zeros(2, 4))


@pytest.mark.usefixtures("operators")
class TestLibraries:
    def test_transformers(self):
        pytest.importorskip("transformers")
        from transformers.models.cohere.modeling_cohere import CohereLayerNorm
        from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
        from transformers.models.t5.modeling_t5 import T5LayerNorm

        for build, kind in (
            (LlamaRMSNorm, "rms"),
            (T5LayerNorm, "rms"),
            (Gemma2RMSNorm, "rms"),
            (CohereLayerNorm, "layer"),
            (OlmoLayerNorm, "layer"),
        ):
            module = randomised(build(16))
            assert recognise(module).kind == kind
            assert_closed_form(module, (2, 3, 16))

    @pytest.mark.usefixtures("vision")
    def test_vision(self):
        from timm.layers import BatchNormAct2d, LayerNorm2d, RmsNorm
        from torchvision.ops import FrozenBatchNorm2d

        for module, kind, shape in (
            (LayerNorm2d(8), "layer", (2, 8, 3, 3)),
            (RmsNorm(8), "rms", (2, 3, 8)),
            (FrozenBatchNorm2d(8), "batch_eval", (2, 8, 3, 3)),
        ):
            assert recognise(randomised(module)).kind == kind
            assert_closed_form(module, shape)
        assert recognise(BatchNormAct2d(8)) is None, "a norm and an activation in one module"
        assert recognise(BatchNormAct2d(8, apply_act=False)).kind == "batch"
