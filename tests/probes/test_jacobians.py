"""The probe `jacobians` on training models: its numbers, what it leaves alone, and what it says that it cannot see."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import keelscope as ks
from keelscope.errors import CoverageWarning, ProbeError
from keelscope.models import build
from keelscope.oneshot import record_once
from keelscope.probe import Tap, TensorProbe, resolve_probes
from keelscope.statistics import RMS
from keelscope.testing import check_probe
from keelscope_probes.jacobians import JACOBIANS, Products

ALL = "jacobians+sigma_max+sigma_error+lyapunov"


def every_step(name: str = ALL) -> list:
    return [replace(probe, every=1) for probe in resolve_probes(name)]


def batch(positions: int = 8, samples: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (samples, positions), generator=torch.Generator().manual_seed(1))


def loss_of(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, -2), tokens.flatten())


def once(model: nn.Module, inputs: torch.Tensor, probes="jacobians", gradients_of=None) -> ks.Watch:
    """One watched forward and backward, in the user's own loop."""
    with ks.watch(model, probes=probes) as watch:
        loss = model(inputs).square().sum()
        loss.backward() if gradients_of is None else torch.autograd.grad(loss, list(gradients_of.parameters()))
        watch.step()
    return watch


def dense(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The exact Jacobian of every sub-layer of a reference model, the lowest first."""
    found, x = [], model.embedding(tokens)
    with sdpa_kernel(SDPBackend.MATH):
        for sublayer in model.sublayers:
            found.append(torch.autograd.functional.jacobian(sublayer, x).reshape(x.numel(), x.numel()))
            x = sublayer(x).detach()
    return found


@pytest.mark.parametrize("scheme", ["pre_ln", "post_ln", "keel"])
def test_numbers(scheme):
    model, tokens = build(scheme, depth=6, width=32, heads=4, seed=3).double(), batch()
    exact = dense(model, tokens)
    many = replace(JACOBIANS, measures=Products(32))
    run = record_once(model, tokens, loss_of, probes=[*resolve_probes(ALL)[1:], many])
    gain, error = run["jacobians/frobenius_gain"], run["jacobians/frobenius_error"].values[0]
    assert [site.path for site in gain.sites] == [f"sublayers.{i}" for i in range(6)]
    wanted = np.array([float(torch.linalg.norm(jacobian)) / 16 for jacobian in exact])  # sqrt(8 * 32) = 16
    assert (np.abs(gain.values[0] - wanted) < 4 * error).all()
    assert (error / wanted < 0.05).all()
    sigma = np.array([float(torch.linalg.svdvals(jacobian)[0]) for jacobian in exact])
    found, residual = run["jacobians/sigma_max"].values[0], run["jacobians/sigma_error"].values[0]
    np.testing.assert_allclose(found, sigma, rtol=1e-2)
    assert (found <= sigma * (1 + 1e-9)).all()
    assert (sigma - found <= residual + 1e-9).all()
    exponents = run["jacobians/lyapunov"].values[0]  # [site, exponent]
    product = torch.linalg.multi_dot(exact[::-1])
    assert exponents.shape == (6, 4)
    leading = torch.linalg.svdvals(product).log10().numpy()
    assert (exponents[0] * 6 <= leading[0] + 1e-9).all()
    assert (exponents[0] * 6 >= leading[-1] - 1e-9).all()
    rms = 0.5 * np.log10(float(product.square().sum()) / 256) / 6  # of a random direction, as the frame starts
    np.testing.assert_allclose(exponents[0], rms, atol=0.15 / 6 * 2)


def test_exponents_go_from_block_to_block():
    """A stack of known matrices: the value at an entry is the mean over the entries from there to the top."""

    class Entry(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.inner, self.factor = nn.Identity(), nn.Parameter(torch.tensor(factor))

        def forward(self, x):
            return self.inner(x) * self.factor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Entry(10.0**i) for i in range(4))

        def forward(self, x, detour=False):
            x = self.first(x)
            for i, block in enumerate(self.blocks):
                x = block(x)
                x = x + 0 if detour and i == 1 else x
            return x

    model = Model()
    wanted = [1.5, 2.0, 2.5, 3.0]
    run = record_once(model, torch.randn(2, 6), lambda y, _: y.sum(), probes="jacobians+lyapunov")
    np.testing.assert_allclose(run["jacobians/lyapunov"].values[0], np.array(wanted)[:, None] * np.ones(4), atol=1e-5)
    np.testing.assert_allclose(run["jacobians/frobenius_gain"].values[0], [1, 10, 100, 1000], rtol=1e-6)
    np.testing.assert_allclose(run["jacobians/frobenius_error"].values[0], 0, atol=1e-3)
    broken = record_once(
        model, {"x": torch.randn(2, 6), "detour": True}, lambda y, _: y.sum(), probes="jacobians+lyapunov"
    )
    np.testing.assert_allclose(broken["jacobians/lyapunov"].values[0, :, 0], [0.5, 1.0, 2.5, 3.0], atol=1e-5)


def test_gpt2(operators):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=32, n_layer=3, n_head=4, n_positions=8)).double().eval()
    tokens = batch()
    states = model(tokens, output_hidden_states=True).hidden_states

    def first(block):
        return lambda x: out[0] if isinstance(out := block(x), tuple) else out

    with sdpa_kernel(SDPBackend.MATH):
        exact = [
            torch.autograd.functional.jacobian(first(model.transformer.h[i]), states[i].detach()).reshape(256, 256)
            for i in range(3)
        ]
    run = record_once(model, {"input_ids": tokens, "labels": tokens}, probes=ALL)
    gain, error = (run[f"jacobians/frobenius_{name}"].values[0] for name in ("gain", "error"))
    wanted = np.array([float(torch.linalg.norm(jacobian)) / 16 for jacobian in exact])
    assert (np.abs(gain - wanted) < 5 * error).all()
    sigma = [float(torch.linalg.svdvals(jacobian)[0]) for jacobian in exact]
    np.testing.assert_allclose(run["jacobians/sigma_max"].values[0], sigma, rtol=1e-3)


def trained(model: nn.Module, steps: int, *, attention=None, **options) -> tuple[list[torch.Tensor], ks.Watch | None]:
    """Everything that must not differ, after a few steps."""
    torch.manual_seed(7)
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    with (
        ks.watch(model, optimizer=optimizer, **options) if options else nullcontext() as watch,
        sdpa_kernel(attention) if attention else nullcontext(),
    ):
        for step in range(steps):
            for micro in range(2):
                loss = loss_of(model(batch(samples=2) + step + micro & 255), batch(samples=2))
                loss.backward()
                seen.append(loss.detach())
            optimizer.step()
            seen += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.zero_grad()
    return [*seen, *(p.detach() for p in model.parameters()), torch.get_rng_state()], watch


@pytest.mark.parametrize("scheme", ["pre_ln", "post_ln", "keel"])
def test_training_is_bit_identical(scheme):
    model = build(scheme, depth=4, width=32, heads=4, dropout=0.2)
    plain, _ = trained(model, 6, attention=SDPBackend.MATH)
    watched, watch = trained(model, 6, attention=SDPBackend.MATH, probes=["default", *every_step()])
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    for name in ("frobenius_gain", "frobenius_error", "sigma_max", "sigma_error", "lyapunov"):
        values = watch.run[f"jacobians/{name}"].values
        assert values.shape[:2] == (6, 4)
        assert np.isfinite(values).all(), name
    assert len(np.unique(watch.run["jacobians/frobenius_gain"].values)) == 24


def test_random_signs_are_the_same_in_every_run():
    model = build("keel", depth=4, width=32, heads=4)
    first, second = (trained(model, 3, probes=every_step("jacobians"))[1].run for _ in range(2))
    np.testing.assert_array_equal(first["jacobians/frobenius_gain"].values, second["jacobians/frobenius_gain"].values)


def test_users_hooks_run_as_often_as_without():
    def counted(**options) -> list[str]:
        seen: list[str] = []
        model = build("pre_ln", depth=4, width=32, heads=4)
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda _, name=name: seen.append(name))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"{name} accumulated"))
        for name, module in model.named_modules():
            module.register_forward_hook(
                lambda m, i, o, name=name: (
                    seen.append(f"{name} forward"),
                    o.register_hook(lambda _: seen.append(f"{name} gradient")),
                    None,
                )[-1]
            )
        with ks.watch(model, **options) if options else nullcontext() as watch:
            loss_of(model(batch()), batch()).backward()
            if watch is not None:
                watch.step()
                assert np.isfinite(watch.run["jacobians/frobenius_gain"].values).all()
        return seen

    assert counted(probes=["default", "jacobians"], sites="all") == counted()


def test_other_probes_see_nothing_of_it():
    model = build("keel", depth=4, width=32, heads=4)
    alone = record_once(model, batch(), loss_of, probes="default")
    beside = record_once(model, batch(), loss_of, probes=["default", "jacobians+lyapunov"])
    for name in ("gradients/norm", "outputs/rms", "parameter_gradients/norm", "norms/measured_gain"):
        np.testing.assert_array_equal(alone[name].values, beside[name].values)


def test_micro_batches_are_averaged():
    """|J|^2 of two micro-batches together is the mean of each; with products without variance, exactly."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weight = nn.Identity(), nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.inner(x) * self.weight * x.detach().abs().max()

    model = nn.Sequential(Scale(), Scale())
    with ks.watch(model, probes="jacobians+lyapunov") as watch:
        for size in (3.0, 4.0):
            model(torch.full((1, 4), size, requires_grad=True)).sum().backward()
        watch.step()
    gains = watch.run["jacobians/frobenius_gain"].values[0]
    np.testing.assert_allclose(gains, [np.sqrt((9 + 16) / 2), np.sqrt((81 + 256) / 2)], rtol=1e-6)
    wanted = np.mean([np.log10([3, 9]), np.log10([4, 16])], axis=0)
    np.testing.assert_allclose(watch.run["jacobians/lyapunov"].values[0, 1], wanted[1], rtol=1e-5)


def test_each_twentieth_recorded_step():
    model = build("keel", depth=4, width=16, heads=2)
    _, watch = trained(model, 45, probes="jacobians", every=2)
    assert watch.run["jacobians/frobenius_gain"].steps.tolist() == [0, 40]


def test_entries_of_stacks_only():
    run = record_once(build("keel", depth=4, width=16, heads=2), batch(), loss_of, probes=["default", "jacobians"])
    assert {site.role for site in run["jacobians/frobenius_gain"].sites} == {"layer"}
    assert {site.role for site in run["gradients/norm"].sites} > {"layer"}


class Ordinary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(x).tanh()


class CheckpointedInside(Ordinary):
    def forward(self, x):
        return x + checkpoint(self.linear, x, use_reentrant=False)


class FSDPModule(Ordinary):
    """A block whose class has the name that `fully_shard` adds."""


class Detached(Ordinary):
    def forward(self, x):
        return self.linear(x.detach())


def stack(kind: type[nn.Module], wrap=None) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.blocks = nn.ModuleList(kind() for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = wrap(block, x) if wrap else block(x)
            return x

    return Model()


CANNOT = {
    "checkpoint inside": (lambda: stack(CheckpointedInside), "saved-tensor hooks"),
    "checkpointed": (lambda: stack(Ordinary, lambda b, x: checkpoint(b, x, use_reentrant=False)), "saved-tensor hooks"),
    "reentrant": (lambda: stack(Ordinary, lambda b, x: checkpoint(b, x, use_reentrant=True)), "checkpointing"),
    "sharded": (lambda: stack(FSDPModule), "sharded by FSDP"),
    "detached": (lambda: stack(Detached), "does not depend on its first input"),
}


@pytest.mark.parametrize("how", CANNOT)
def test_where_it_does_not_look(how):
    make, reason = CANNOT[how]
    torch.manual_seed(0)
    model = make()
    x = torch.randn(3, 6)
    with pytest.warns(CoverageWarning, match=reason) as said:
        watch = once(model, x, ["default", "jacobians"])
    assert len(said) == 1
    assert np.isnan(watch.run["jacobians/frobenius_gain"].values).all()
    assert np.isfinite(watch.run["gradients/norm"].of("blocks.1").values).all()
    entry = next(entry for entry in watch.coverage if entry.path == "blocks.1")
    assert (entry.status, reason in entry.reason) == ("observed", True)


def test_compiled_parts_are_not_looked_into():
    torch._dynamo.reset()
    model = stack(Ordinary)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for block in model.blocks:
            compiled = torch.compile(block.linear.forward, backend="aot_eager")
            block.linear.forward = lambda x, run=compiled: run(x)  # not seen as compiled
        with pytest.warns(CoverageWarning, match="CompiledFunction"):
            watch = once(model, torch.randn(3, 6))
    assert np.isnan(watch.run["jacobians/frobenius_gain"].values).all()


def test_fused_attention_has_no_second_derivative():
    """The Frobenius gain is there, the largest singular value is not, and the way out is named once."""
    model = build("pre_ln", depth=4, width=32, heads=4)
    with pytest.warns(CoverageWarning, match=r"SDPBackend\.MATH") as said:
        watch = once(model, batch(), ALL)
    assert len(said) == 1
    assert np.isfinite(watch.run["jacobians/frobenius_gain"].values).all()
    sigma = watch.run["jacobians/sigma_max"].values[0]
    assert np.isnan(sigma).tolist() == [True, False, True, False]  # attention, feed-forward, ...


def test_report_takes_the_attention_it_needs():
    run = record_once(build("pre_ln", depth=4, width=32, heads=4), batch(), loss_of, probes=ALL)
    assert np.isfinite(run["jacobians/sigma_max"].values).all()


def test_gradients_of_some_tensors_only():
    """`torch.autograd.grad` may leave nodes out; what they would pass on is then not there."""
    model = stack(Ordinary)
    watch = once(model, torch.randn(3, 6), gradients_of=model.first)
    assert np.isfinite(watch.run["jacobians/frobenius_gain"].values).all()
    with pytest.warns(CoverageWarning, match="does not compute"):
        watch = once(model, torch.randn(3, 6), gradients_of=model.blocks[1])
    assert np.isnan(watch.run["jacobians/frobenius_gain"].values).all()


class Traced(torch.autograd.Function):
    """Something in the graph that can be watched from outside."""

    alive: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    @staticmethod
    def forward(ctx, x):
        Traced.alive.add(ctx)
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.parametrize("backward", [True, False])
def test_graphs_are_let_go(backward):
    model = stack(Ordinary)
    gc.collect()
    gc.disable()
    try:
        with ks.watch(model, probes=every_step()) as watch:
            for _ in range(5):
                loss = model(Traced.apply(torch.randn(3, 6, requires_grad=True))).sum()
                if backward:
                    loss.backward()
                del loss
                watch.step()
                assert len(Traced.alive) <= 1
        assert len(Traced.alive) == 0
    finally:
        gc.enable()


def test_contract():
    check_probe(replace(JACOBIANS, measures=Products(2)))
    plain = TensorProbe("mine", Tap.JACOBIAN, (RMS,))
    with pytest.raises(ProbeError, match="only a JacobianProbe"):
        resolve_probes([plain])
