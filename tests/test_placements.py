"""Hooks that come and go with recorded steps: where they are, in which order, and what they leave behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope import kernel
from keelscope.passes import make_passes
from keelscope.placements import Placements


@pytest.fixture(params=["kernel", "torch"])
def compiled(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(kernel, "_native", None)
    elif not kernel.is_compiled():
        pytest.skip("the kernel is not compiled")


LATE, FREE = (False,), (True,)


def hooks_of(model: nn.Module) -> list[dict]:
    modules = [d for m in model.modules() for d in (m._forward_hooks, m._forward_hooks_with_kwargs)]
    marks = ({**(p._post_accumulate_grad_hooks or {}), **(p._backward_hooks or {})} for p in model.parameters())
    return [*modules, *marks]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.usefixtures("compiled")
class TestPlacements:
    def test_a_hook_goes_back_to_its_place_among_others(self):
        called = []

        def says(name):
            return lambda *_: called.append(name)

        layer, placements = nn.Linear(2, 2), Placements()
        layer.register_forward_hook(says("before"))
        placements.put(0, layer, says("ours"), alone=True)
        layer.register_forward_hook(says("after"))
        layer.register_forward_hook(says("in front"), prepend=True)
        placements.take_all()
        leaving = layer.register_forward_hook(says("meanwhile"))
        for _ in range(2):
            assert set(placements.put_back()) == {0}
            layer(torch.ones(1, 2))
            assert called == ["in front", "before", "ours", "after", "meanwhile"]
            called.clear()
            placements.take_all()
            placements.take_all()
            assert len(layer._forward_hooks) == 4
            assert not layer._forward_hooks_with_kwargs
        leaving.remove()
        placements.put_back()
        layer(torch.ones(1, 2))
        assert called == ["in front", "before", "ours", "after"]

    @pytest.mark.parametrize("every", [1, 2])
    def test_what_a_later_hook_makes_of_an_output_is_not_recorded(self, every):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with ks.watch(net, optimizer=optimizer, sites="leaves", every=every) as watch:
            net[0].register_forward_hook(lambda *call: 10 * call[2])
            seen = []
            net[0].register_forward_hook(lambda *call: seen.append(call[2].square().mean().sqrt().item()))
            for _ in range(5):
                train(net, optimizer)
        rms = watch.run["outputs/rms"]
        assert rms.of("0").values.ravel().tolist() == pytest.approx([x / 10 for x in seen[::every]], rel=1e-6)

    def test_only_hooks_that_come_alone_are_put_back_together(self):
        one, other, placements = nn.Linear(2, 2), nn.Linear(2, 2), Placements()
        placements.put(0, one, print, alone=True)
        placements.put(1, other, print, alone=False)
        placements.take_all()
        assert set(placements.put_back()) == {0}
        assert (len(one._forward_hooks), len(other._forward_hooks)) == (1, 0)
        placements.put(1, other, print, alone=False)
        assert list(other._forward_hooks.values()) == [print]

    def test_what_is_forgotten_does_not_come_back(self):
        layer, placements = nn.Linear(2, 2), Placements()
        placements.put(0, layer, print, alone=True)
        placements.forget(0)
        assert not layer._forward_hooks
        assert not placements.put_back()

    def test_a_module_that_is_gone_is_passed_by(self):
        layer, kept, placements = nn.Linear(2, 2), nn.Linear(2, 2), Placements()
        placements.put(0, layer, print, alone=True)
        placements.put(1, kept, print, alone=True)
        placements.take_all()
        gone = weakref.ref(layer)
        del layer
        gc.collect()
        assert gone() is None
        placements.put_back()
        assert len(kept._forward_hooks) == 1


class Owner:
    def _backward_begins(self) -> None: ...


@pytest.mark.usefixtures("compiled")
class TestMarks:
    def placed(self, *parameters: nn.Parameter):
        owner = Owner()
        passes = make_passes(weakref.ref(owner), [weakref.ref(p) for p in parameters])
        marks = []
        for i, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(print).remove()
            marks.append(passes.mark(i, parameter._post_accumulate_grad_hooks, *LATE))
        return owner, passes, marks

    def test_marks_note_only_while_they_are_there(self):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        _owner, passes, marks = self.placed(a, b)
        for on in (True, False, True):
            if on:
                assert passes.put_back(marks, *FREE)
            else:
                passes.take_off(marks, *FREE)
            (a.sum() + b.sum()).backward()
            assert list(passes.take()[0]) == [on, on]

    @pytest.mark.parametrize("change", ["frozen", "hooks elsewhere", "gone"])
    def test_none_is_put_back_where_one_does_not_fit(self, change):
        a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        _owner, passes, marks = self.placed(a, b)
        if change == "frozen":
            b.requires_grad_(requires_grad=False)
        elif change == "hooks elsewhere":
            b._post_accumulate_grad_hooks = type(b._post_accumulate_grad_hooks)()
        else:
            del b
            gc.collect()
        assert not passes.put_back(marks, *FREE)
        assert not a._post_accumulate_grad_hooks


@pytest.mark.usefixtures("compiled")
def test_steps_not_recorded_carry_no_hook_and_recorded_ones_the_same_as_before():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ks.watch(net, optimizer=optimizer, every=3):
        counts = []
        for _ in range(10):
            counts.append([len(d) for d in hooks_of(net)])
            train(net, optimizer)
        first, recorded = counts[0], counts[3]  # on the first step the structure is read as well
        assert all(some <= more for some, more in zip(recorded, first, strict=True))
        assert recorded[-4:] == [1, 1, 1, 1]
        assert any(recorded[:-4])
        assert counts[1:] == [recorded if k % 3 == 0 else [0] * len(recorded) for k in range(1, 10)]
    assert not any(hooks_of(net))


@pytest.mark.usefixtures("compiled")
def test_parameters_frozen_and_unfrozen_between_recorded_steps():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ks.watch(net, optimizer=optimizer, every=2) as watch:
        for k in range(10):
            net[0].weight.requires_grad_(k not in {3, 4})
            train(net, optimizer)
    seen = watch.run["parameter_gradients/norm"].of("0.weight").values[:, 0]  # [row]
    assert [bool(value == value) for value in seen] == [True, True, False, True, True]


@pytest.mark.usefixtures("compiled")
def test_values_are_those_of_every_step():
    """What a sparse watch records of a step is what a dense one does."""
    runs = []
    for every in (1, 3):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with ks.watch(net, optimizer=optimizer, every=every) as watch:
            for _ in range(7):
                train(net, optimizer)
        runs.append(watch.run)
    for name in ("outputs/rms", "gradients/norm", "parameter_gradients/norm"):
        dense, sparse = (run[name].values for run in runs)
        assert sparse.shape[0] == 3
        assert (dense[::3] == sparse).all()
