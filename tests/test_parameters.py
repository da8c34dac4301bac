"""Which gradient of a parameter is *the* gradient: whole step, before clipping, of the loss its optimizer used."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.parameters import ParameterHooks
from keelscope.probe import available_probes
from keelscope.sites import plan_sites


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(step))


def norm(tensor: torch.Tensor) -> float:
    return tensor.double().norm().item()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(net: nn.Module, **options) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1, **options)


def record(net: nn.Module, optimizer, step, steps: int = 3, **options) -> ks.Run:
    with ks.watch(net, optimizer=optimizer, **options) as watch:
        for k in range(steps):
            step(k)
            watch.step()
    return watch.run


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_clipping_and_zeroing_come_later(given, to_none, when):
    """Whether the optimizer is given or not, gradients are zeroed first or last, to None or to 0."""
    net = model()
    optimizer, wanted = sgd(net), []

    def step(k: int) -> None:
        if when == "before":
            optimizer.zero_grad(set_to_none=to_none)
        net(batch(k)).square().sum().backward()
        wanted.append([norm(p.grad) for p in net.parameters()])
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        optimizer.step()
        if when == "after":
            optimizer.zero_grad(set_to_none=to_none)

    run = record(net, optimizer if given else None, step)
    np.testing.assert_allclose(run["parameter_gradients/norm"].values, wanted, rtol=1e-6)


def test_what_the_optimizer_got_beside_what_there_was():
    """One parameter is clipped by value, all by norm on the last step only."""
    net = model()
    optimizer, wanted, used = sgd(net), [], []

    def step(k: int) -> None:
        optimizer.zero_grad()
        net(batch(k)).square().sum().backward()
        wanted.append([norm(p.grad) for p in net.parameters()])
        nn.utils.clip_grad_value_([net[0].weight], 0.1)
        if k == 2:
            nn.utils.clip_grad_norm_(net.parameters(), 1e-2)
        used.append([norm(p.grad) for p in net.parameters()])
        optimizer.step()

    run = record(net, optimizer, step, probes="parameter_gradients+clipped_norm")
    np.testing.assert_allclose(run["parameter_gradients/norm"].values, wanted, rtol=1e-6)
    np.testing.assert_allclose(run["parameter_gradients/clipped_norm"].values, used, rtol=1e-6)
    assert used[0][0] < wanted[0][0]
    assert run.groups["parameter_gradients"].provenance["clipped"] == "as the optimizer got it"


def test_optimizer_inside_backward():
    """The gradient is gone when backward ends; what reached the leaf stands for it."""
    net = model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
    wanted: list[dict[int, float]] = []

    def use_up(parameter: nn.Parameter) -> None:
        wanted[-1][id(parameter)] = norm(parameter.grad)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(use_up)

    def step(k: int) -> None:
        wanted.append({})
        net(batch(k)).square().sum().backward()

    for given in (None, list(optimizers.values())):
        wanted.clear()
        run = record(net, given, step)
        expected = [[found[id(p)] for p in net.parameters()] for found in wanted]
        np.testing.assert_allclose(run["parameter_gradients/norm"].values, expected, rtol=1e-6)
        assert run["parameter_gradients/norm"].steps.tolist() == [0, 1, 2]


def test_stale_gradient_of_an_unused_parameter_is_what_the_optimizer_uses():
    net = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    optimizer = sgd(net)
    wanted = []

    def step(k: int) -> None:
        if k == 0:
            optimizer.zero_grad()
        net["a" if k else "b"](batch(k)).sum().backward()
        wanted.append([math.nan if p.grad is None else norm(p.grad) for p in net.parameters()])
        optimizer.step()

    run = record(net, optimizer, step)
    paths = [name for name, _ in net.named_parameters()]
    got = np.stack([run["parameter_gradients/norm"].of(path).values[:, 0] for path in paths], axis=1)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_exactly_zero_and_none_stay_apart():
    net = model()
    optimizer = sgd(net)
    net[0].weight.requires_grad_(requires_grad=False)

    def step(_: int) -> None:
        optimizer.zero_grad()
        (0 * net(batch())).sum().backward()
        optimizer.step()

    run = record(net, optimizer, step, steps=1)
    assert run["parameter_gradients/norm"].of("0.bias").values.tolist() == [[0.0]]
    assert np.isnan(run["parameter_gradients/norm"].of("0.weight").values).all()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_gradients_are_recorded_as_such(bad):
    net = model()
    optimizer = sgd(net)

    def step(k: int) -> None:
        optimizer.zero_grad()
        (net(batch()) * (bad if k == 1 else 1.0)).sum().backward()
        if k != 1:
            optimizer.step()

    with ks.watch(net, sites="all") as watch:
        for k in range(3):
            step(k)
            watch.step()
    series = watch.run["parameter_gradients/norm"].of("2.bias")
    np.testing.assert_equal(series.values[1, 0], bad)
    assert np.isfinite(series.values[[0, 2], 0]).all()
    assert watch.run["gradients/nonfinite_count"].of("2").values[:, 0].tolist() == [0, 5, 0]


def test_sparse_gradients():
    net = nn.Embedding(20, 3, sparse=True)
    optimizer = sgd(net)
    wanted = []

    def step(k: int) -> None:
        optimizer.zero_grad()
        (net(torch.tensor([1, 1, 4])).square() * (k + 1)).sum().backward()
        wanted.append(norm(net.weight.grad.to_dense()))
        optimizer.step()

    run = record(net, optimizer, step)
    np.testing.assert_allclose(run["parameter_gradients/norm"].values[:, 0], wanted, rtol=1e-6)
    np.testing.assert_allclose(run["parameter_gradients/rms"].values[:, 0], np.array(wanted) / math.sqrt(60), rtol=1e-6)


def test_lazy_parameters_join_when_they_have_a_shape():
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 1))
    with ks.watch(net) as watch:
        net(batch()).square().sum().backward()
        watch.step()
    series = watch.run["parameter_gradients/norm"]
    assert np.isfinite(series.values).all()
    assert {site.path: site.numel for site in series.sites}["0.weight"] == 12
    assert np.isfinite(watch.run["parameters/norm"].values).all()


def test_parameters_in_several_groups_and_only_some_in_the_optimizer():
    net = model()
    optimizer = torch.optim.SGD([{"params": [net[0].weight]}, {"params": [net[2].weight], "lr": 0.3}], lr=0.1)
    wanted = []

    def step(k: int) -> None:
        net.zero_grad()
        net(batch(k)).square().sum().backward()
        wanted.append([norm(p.grad) for p in net.parameters()])
        optimizer.step()

    run = record(net, optimizer, step, probes=["default", "updates"])
    np.testing.assert_allclose(run["parameter_gradients/norm"].values, wanted, rtol=1e-6)
    moved = np.isfinite(run["updates/norm"].values[0])
    assert moved.tolist() == [True, False, True, False]
    np.testing.assert_allclose(run["updates/norm"].of("2.weight").values[:, 0], [0.3 * w[2] for w in wanted], rtol=1e-4)


def test_a_failed_backward_does_not_spoil_the_next():
    net = model()
    optimizer = sgd(net)
    fail = torch.autograd.function.once_differentiable

    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        @fail
        def backward(_, g):
            raise RuntimeError("lost")

    with ks.watch(net, optimizer=optimizer, sites="all") as watch:
        hidden = net[2](Explode.apply(net[1](net[0](batch()))))
        with pytest.raises(RuntimeError, match="lost"):
            hidden.sum().backward()
        optimizer.zero_grad()
        net(batch()).square().sum().backward()
        wanted = [norm(p.grad) for p in net.parameters()]
        optimizer.step()
    np.testing.assert_allclose(watch.run["parameter_gradients/norm"].values[0], wanted, rtol=1e-6)


def test_attach_is_idempotent_and_detach_complete():
    net = model()
    plan = plan_sites(net)
    hooks = ParameterHooks(plan.parameters, tuple(available_probes().values()), leaf_always=True)
    counts = []
    for action in (hooks.attach, hooks.attach, hooks.detach, hooks.detach, hooks.attach, hooks.detach):
        action()
        counts.append(
            sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())
        )
    assert counts == [8, 8, 0, 0, 8, 0]


def marked(net: nn.Module) -> int:
    return sum(bool(parameter._post_accumulate_grad_hooks) for parameter in net.parameters())


@pytest.mark.parametrize(("probes", "expected"), [("outputs", 12), ("gradients", 12), ("default", 24)])
def test_without_a_probe_of_parameters_one_of_each_module_is_marked(probes, expected):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    optimizer = sgd(net)
    with ks.watch(net, optimizer=optimizer, probes=probes) as watch:
        for k in range(3):
            net(batch(k)).square().sum().backward()
            assert marked(net) == expected
            optimizer.step()
            optimizer.zero_grad()
            assert watch._recorder.parameters.has_stepped
    assert marked(net) == 0
    assert len(watch.run.steps) == 3


def test_a_step_without_a_gradient_of_the_first_parameters_is_one():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    optimizer = sgd(net)
    with ks.watch(net, optimizer=optimizer, probes="outputs") as watch:
        net[8:](batch()).square().sum().backward()
        optimizer.step()
        assert watch._recorder.parameters.has_stepped


@pytest.mark.parametrize("probes", ["outputs", "default"])
def test_the_marks_that_are_left_tell_that_gradients_were_rewritten(probes):
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    optimizer = sgd(net)
    with ks.watch(net, optimizer=optimizer, probes=probes) as watch:
        net(batch()).square().sum().backward()
        assert not watch._recorder.parameters.rewritten(optimizer)
        for parameter in net.parameters():
            parameter.grad.mul_(0.5)
        assert watch._recorder.parameters.rewritten(optimizer)


class Halves(nn.Module):
    """Two halves; the second one alone gives the output."""

    def __init__(self):
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(3, 3) for _ in range(10))
        self.after = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        for layer in self.before:
            x = x + torch.tanh(layer(x))
        for layer in self.after:
            x = x + torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("every", [1, 2])
def test_micro_batches_are_one_row_where_the_parameters_that_tell_of_passes_change(every):
    """The half that trains is frozen, and the one that did not train begins to: no pass reaches a marked parameter."""
    found = []
    for probes in (["gradients", "sublayers"], ["gradients", "sublayers", "parameter_gradients"]):
        torch.manual_seed(0)
        net = Halves()
        optimizer = sgd(net)
        net.after.requires_grad_(False)  # noqa: FBT003 - torch's own
        with ks.watch(net, optimizer=optimizer, probes=probes, every=every) as watch:
            for k in range(6):
                if k == 3:
                    net.before.requires_grad_(False)  # noqa: FBT003
                    net.after.requires_grad_(True)  # noqa: FBT003
                for _ in range(3):
                    net(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(watch.run["gradients/rms"].of("after.2").values)
    assert len(found[0]) == 6 // every
    np.testing.assert_array_equal(*found)
