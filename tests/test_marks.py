"""Marks that come and go: what is noted is the same as with marks that stay, and nothing is left on parameters."""

from __future__ import annotations

import copy
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keelscope as ks
from keelscope import kernel, marks

needs_kernel = pytest.mark.skipif(not kernel.is_compiled(), reason="early marks need the compiled kernel")
PROBES = ("default", "parameter_gradients+clipped_norm", "updates", "clipped_gradients")


class Training:
    """A net, its optimizer, and one way to make a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)

    def loss(self, k: int) -> torch.Tensor:
        return self.net(torch.randn(5, 3, generator=torch.Generator().manual_seed(k))).square().mean()

    def end(self, *, to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)


def plain(t: Training, k: int) -> None:
    t.loss(k).backward()
    t.end()


def zeroed(t: Training, k: int) -> None:
    t.loss(k).backward()
    t.end(to_none=False)


def accumulated(t: Training, k: int) -> None:
    for part in range(3):
        t.loss(3 * k + part).backward()
    t.end()


def clipped(t: Training, k: int) -> None:
    t.loss(k).backward()
    nn.utils.clip_grad_norm_(t.net.parameters(), 1e-2)
    t.end()


def retained(t: Training, k: int) -> None:
    loss = t.loss(k)
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    t.end()


def with_graph(t: Training, k: int) -> None:
    t.loss(k).backward(create_graph=True)
    t.loss(k + 1).backward(create_graph=True)
    t.end()


def penalised(t: Training, k: int) -> None:
    """torch.autograd.grad calls hooks of leaves, and accumulates nothing."""
    loss = t.loss(k)
    gradients = torch.autograd.grad(loss, list(t.net.parameters()), create_graph=True)
    (loss + 1e-3 * sum(gradient.square().sum() for gradient in gradients)).backward()
    t.end()


def penalised_before(t: Training, k: int) -> None:
    """Between the steps, and in the middle of a forward, of something that is no part of the loss."""
    torch.autograd.grad(t.net[0].weight.square().sum(), t.net[0].weight)
    hidden = t.net[:2](torch.randn(5, 3, generator=torch.Generator().manual_seed(k)))
    torch.autograd.grad(t.net[2].weight.square().sum(), t.net[2].weight)
    (t.net[2:](hidden).square().mean() + t.loss(k)).backward()
    t.end()


def by_hand(t: Training, k: int) -> None:
    parameters = list(t.net.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(t.loss(k), parameters), strict=True):
        parameter.grad = gradient
    t.end()


def regularised(t: Training, k: int) -> None:
    """A pass of its own that reaches no output of a module."""
    t.loss(k).backward()
    (0.1 * t.net[0].weight.square().sum()).backward()
    nn.utils.clip_grad_norm_(t.net.parameters(), 1e-2)
    t.end()


def some_inputs(t: Training, k: int) -> None:
    t.loss(k).backward(inputs=[t.net[0].weight, t.net[4].bias])
    t.end()


def unused(t: Training, k: int) -> None:
    (t.loss(k) if k % 4 else t.net[0].weight.square().sum()).backward()
    t.end()


def hooked_leaf(t: Training, k: int) -> None:
    """A hook of the user that changes the gradient, there for one step."""
    handle = t.net[2].weight.register_hook(lambda gradient: 2 * gradient)
    t.loss(k).backward()
    handle.remove()
    t.end()


def doubled(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(2)


def hooked_after(t: Training, k: int) -> None:
    handle = t.net[2].weight.register_post_accumulate_grad_hook(doubled)
    t.loss(k).backward()
    handle.remove()
    t.end()


def hooked_for_good(t: Training, k: int) -> None:
    if k == 3:
        t.net[0].weight.register_hook(lambda gradient: gradient * 3)
    plain(t, k)


def used_up(t: Training, k: int) -> None:
    """Gradients are taken and cleared inside backward."""
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        for parameter in t.net[2].parameters()
    ]
    t.loss(k).backward()
    for handle in handles:
        handle.remove()
    t.end()


def checkpointed(t: Training, k: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(k), requires_grad=True)
    t.net[4](checkpoint(t.net[:4], x, use_reentrant=k % 4 == 0)).square().mean().backward()
    t.end()


def frozen(t: Training, k: int) -> None:
    t.net[0].requires_grad_(requires_grad=k % 4 == 0)
    plain(t, k)


def replaced(t: Training, k: int) -> None:
    if k == 3:
        t.net[4] = nn.Linear(4, 1)
        t.optimizer.add_param_group({"params": list(t.net[4].parameters())})
    plain(t, k)


WAYS = (
    *(plain, zeroed, accumulated, clipped, retained, penalised, penalised_before, by_hand, regularised, some_inputs),
    *(unused, hooked_leaf, hooked_after, hooked_for_good, used_up, checkpointed, frozen, replaced),
    pytest.param(with_graph, marks=pytest.mark.filterwarnings("ignore:Using backward")),
)


def recorded(way, monkeypatch, *, early: bool, **options) -> tuple[ks.Run, Training]:
    with monkeypatch.context() as patch:
        if not early:
            patch.setattr(marks.Marks, "may_be_early", lambda _: False)
        training = Training()
        options = {"every": 2, "probes": PROBES} | options
        with ks.watch(training.net, optimizer=training.optimizer, **options) as watch:
            for k in range(8):
                way(training, k)
    return watch.run, training


@needs_kernel
@pytest.mark.filterwarnings("ignore::keelscope.errors.CoverageWarning")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_recorded_is_the_same(way, monkeypatch):
    (early, first), (late, second) = (recorded(way, monkeypatch, early=early) for early in (True, False))
    assert early.groups.keys() == late.groups.keys()
    for name in early.groups:
        for statistic in (spec.name for spec in early.groups[name].statistics):
            one, other = early[f"{name}/{statistic}"], late[f"{name}/{statistic}"]
            assert one.steps.tolist() == other.steps.tolist()
            np.testing.assert_array_equal(one.values, other.values, err_msg=f"{name}/{statistic}")
    for one, other in zip(first.net.parameters(), second.net.parameters(), strict=True):
        assert torch.equal(one, other)


@needs_kernel
def test_nothing_is_left_on_parameters():
    t = Training()
    with ks.watch(t.net, optimizer=t.optimizer, every=3):
        for k in range(7):
            marked = [p._backward_hooks is not None for p in t.net.parameters()]
            assert marked == [k % 3 == 0] * len(marked)
            plain(t, k)
    assert all(p._backward_hooks is None and p._post_accumulate_grad_hooks is None for p in t.net.parameters())


def test_steps_in_a_row_keep_late_marks():
    t = Training()
    with ks.watch(t.net, optimizer=t.optimizer):
        plain(t, 0)
        assert all(p._backward_hooks is None and p._post_accumulate_grad_hooks for p in t.net.parameters())


@needs_kernel
def test_hooks_of_others_stay_where_they_are():
    t, seen = Training(), []
    with ks.watch(t.net, optimizer=t.optimizer, every=2):
        handle = t.net[0].weight.register_hook(seen.append)  # into the dictionary of our mark
        for k in range(5):
            plain(t, k)
        assert len(seen) == 5
        handle.remove()
        plain(t, 5)
    assert len(seen) == 5
    assert not t.net[0].weight._backward_hooks


@needs_kernel
def test_closed_inside_a_backward_pass():
    """torch is looking at the hooks just then: they lose the mark, and stay."""
    t = Training()
    watch = ks.watch(t.net, optimizer=t.optimizer, every=2)
    t.net[2].weight.register_hook(lambda _: watch.close())
    t.loss(0).backward()
    assert not any(p._backward_hooks for p in t.net[0].parameters())
    t.end()


@needs_kernel
def test_closed_while_another_thread_runs_backward(monkeypatch):
    t, inside, go_on = Training(), threading.Event(), threading.Event()
    with ks.watch(t.net, optimizer=t.optimizer, every=2) as watch:
        x = torch.ones(3, requires_grad=True)
        y = x * 2

        def wait(_: torch.Tensor) -> None:
            inside.set()
            go_on.wait(10)

        y.register_hook(wait)
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        inside.wait(10)
        watch.close()
        assert all(p._backward_hooks == {} for p in t.net.parameters())
        go_on.set()
        thread.join()
    plain(t, 0)


@needs_kernel
def test_copies_have_no_marks():
    t = Training()
    with ks.watch(t.net, optimizer=t.optimizer, every=2):
        assert all(p._backward_hooks is None for p in copy.deepcopy(t.net).parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.utils.hooks.warn_if_has_hooks(t.net[0].weight)
