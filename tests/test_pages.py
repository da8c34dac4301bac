"""What pages record is what single hooks record, to the last digit but rounding; with the kernel and without."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keelscope as ks
from keelscope import hooks, kernel
from keelscope.batch import Batch
from keelscope.passes import SlowPasses
from keelscope.probe import resolve_probes
from keelscope.unwinding import Breaks

compiled = pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel was not built")
often_or_not = pytest.mark.parametrize("often", [False, True])
both_ways = pytest.mark.usefixtures("way")


@pytest.fixture(params=["compiled", "numpy"])
def way(request, monkeypatch):
    """With the kernel, if it is there, and without."""
    if request.param == "numpy":
        monkeypatch.setattr(kernel, "_native", None)


class Block(nn.Module):
    """A residual block with ways through it that hooks have to follow."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.norm, self.linear = kind, nn.LayerNorm(6), nn.Linear(6, 6)
        self.relu = nn.ReLU(inplace=kind == "in place")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "transposed":  # gradients arrive that are not contiguous
            return (x + self.relu(self.linear(self.norm(x)))).transpose(0, 1).contiguous().transpose(0, 1)
        if self.kind == "twice":
            return x + self.relu(self.linear(self.linear(self.norm(x))))
        if self.kind == "expanded":
            return x + self.linear(self.norm(x)).mean(1, keepdim=True).expand_as(x)
        return x + self.relu(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embedding = kind, nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            is_region = "entrant" in self.kind and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=self.kind == "reentrant") if is_region else block(x)
        return x


def recorded(kind: str, steps: int = 3, *, often: bool = False) -> dict[str, np.ndarray]:
    """What a few steps record; often: with all that is otherwise recorded on each tenth of them."""
    torch.manual_seed(0)
    probes = [replace(probe, every=1) if often else probe for probe in resolve_probes("default")]
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(model, optimizer=optimizer, sites="all", probes=probes) as watch:
        for step in range(steps):
            for part in range(2 if kind == "accumulated" else 1):
                tokens = torch.arange(10).reshape(2, 5) + (step + part) % 2
                loss = model(tokens).square().mean()
                loss.backward(retain_graph=kind == "again")
                if kind == "again":
                    loss.backward()
            if kind == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=kind != "kept")
            with torch.no_grad():
                model(torch.zeros(1, 4, dtype=torch.int64))
        run = watch.run
    assert [entry.status for entry in watch.coverage if entry.what == "parameter"] == ["observed"] * len(
        list(model.parameters())
    )
    return {key: run[key].values for key in run.keys() if "watch_ms" not in key and "wall_time" not in key}  # noqa: SIM118 - a run is no dict


KINDS = [
    "plain",
    "in place",
    "transposed",
    "twice",
    "expanded",
    "accumulated",
    "again",
    "clipped",
    "kept",
    "reentrant",
    "non-reentrant",
]


@compiled
@often_or_not
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_records_what_python_records(kind, often, monkeypatch):
    quick = recorded(kind, often=often)
    monkeypatch.setattr(hooks, "make_page", lambda *_: None)
    monkeypatch.setattr(kernel, "passes", lambda *_: None)
    monkeypatch.setattr(kernel, "pack_all", lambda *_: None)
    slow = recorded(kind, often=often)
    assert quick.keys() == slow.keys()
    for key, values in quick.items():
        np.testing.assert_allclose(values, slow[key], rtol=1e-12, atol=1e-300, err_msg=key)


@often_or_not
@pytest.mark.parametrize("kind", KINDS)
def test_pages_without_the_kernel_record_what_single_hooks_record(kind, often, monkeypatch):
    monkeypatch.setattr(kernel, "_native", None)
    quick = recorded(kind, often=often)
    monkeypatch.setattr(hooks, "make_page", lambda *_: None)
    slow = recorded(kind, often=often)
    assert quick.keys() == slow.keys()
    for key, values in quick.items():
        np.testing.assert_allclose(values, slow[key], rtol=1e-9, atol=1e-15, err_msg=key)


@both_ways
@often_or_not
def test_most_calls_are_taken_by_a_page(often, monkeypatch):
    """Otherwise the tests above compare single hooks with themselves."""
    real = hooks.make_page

    def page(*arguments):
        made = real(*arguments)
        pages.append(made)
        return made

    pages: list = []
    monkeypatch.setattr(hooks, "make_page", page)
    recorded("plain", often=often)
    taken = [sum(state & 1 for state in made.take()[0]) for made in pages]
    arrived = [sum(state >> 1 & 1 for state in made.take()[0]) for made in pages]
    sites = len([module for module in Model("plain").modules() if not isinstance(module, nn.ModuleList)])
    assert max(taken) == max(arrived) == sites - 1, "all but the model: it puts out what its last block does"


@both_ways
def test_a_watched_model_can_be_copied_and_pickled_in_the_middle_of_a_recorded_step():
    model = Model("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.arange(10).reshape(2, 5)
    with ks.watch(model, optimizer=optimizer):
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
        output = model(x)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), model(x))
            twin(x).sum().backward()
        output.sum().backward()


@both_ways
def test_what_a_page_does_not_take():
    module = nn.Linear(3, 3)
    owner = nn.Module()
    page = hooks.make_page([weakref.ref(module)], weakref.ref(owner), Breaks(), bytes([1]), Batch())
    x = torch.ones(2, 3)

    def look(output, watched=module, site=0):
        return page.look(site, watched, (x,), {}, output)

    assert not look(module(x)), "not armed"
    page.armed = 1
    assert not look(module(x), nn.Linear(3, 3)), "another module"
    assert not look((module(x),)), "no tensor"
    assert not look(module(x).detach()), "no gradient"
    assert not look(module(x).t()), "not contiguous"
    assert not look(module(x), site=1)
    with torch.no_grad():
        assert not look(module(x))
    assert look(module(x))
    assert not look(module(x)), "the second call"
    assert page.has(0)
    seen, terms = page.take()
    assert seen == b"\x01"
    assert np.frombuffer(terms)[0] == 6


@compiled
def test_wrong_arguments_are_refused():
    module, owner = nn.Linear(3, 3), nn.Module()
    page = kernel.page([weakref.ref(module)], weakref.ref(owner), Breaks(), bytes([1]))
    with pytest.raises(TypeError, match="a site and what a forward hook gets"):
        page.look(0)
    with pytest.raises(ValueError, match="2 duties for 1 modules"):
        kernel._native.Page([weakref.ref(module)], weakref.ref(owner), Breaks(), b"\1\1")


class Owner:
    def __init__(self) -> None:
        self.begun = 0

    def _backward_begins(self) -> None:
        self.begun += 1


def both(parameters):
    references = [weakref.ref(parameter) for parameter in parameters]
    owners = Owner(), Owner()
    quick = kernel.passes(weakref.ref(owners[0]), references)
    return owners, (quick, SlowPasses(weakref.ref(owners[1]), references))


LATE = (False,)


def mark(passes, parameters):
    """As `keelscope.parameters.ParameterHooks` puts marks on parameters."""
    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(print).remove()
        hooks = parameter._post_accumulate_grad_hooks
        one = passes.mark(i, hooks, *LATE)
        hooks[one] = one


def those(flags):
    return [i for i, flag in enumerate(flags) if flag]


@compiled
def test_passes_are_those_of_python():
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    owners, passes = both(parameters)
    for one in passes:
        mark(one, parameters)
    a, b, _ = parameters

    def same(name, *arguments):
        quick, slow = (getattr(one, name)(*arguments) for one in passes)
        assert repr(quick) == repr(slow), name
        return quick

    assert same("untouched") is False
    (a * b).sum().backward()
    reached, summed, _, running, gradients = same("take")
    assert (reached, summed, running) == (b"\1\1\0", b"", [0, 1])
    assert gradients[0] is a.grad
    assert same("untouched") is True
    assert same("rewritten", [0, 1, 2]) is False
    a.grad.mul_(0.5)
    assert same("rewritten", [0, 1, 2]) is True
    assert same("untouched") is False
    (a * b).sum().backward()
    same("take")
    with torch.no_grad():
        a.mul_(0.5)
    assert same("rewritten", [0, 1, 2]) is False, "its gradient was not"
    assert same("untouched") is False
    parameters[2].grad = torch.ones(2)
    assert same("stepping", [0, 2])[0] == [2], "what no pass has shown"
    (a * b).sum().backward()
    assert same("take")[3] == [1], "the optimizer of the other one has stepped"
    for one in passes:
        one.begin()
    assert same("rewritten", [0, 1, 2]) is False
    assert [owner.begun for owner in owners] == [3, 3]


def scaled(parameter):
    parameter.grad.mul_(0.5)


def stepped(parameter):
    parameter.data.sub_(parameter.grad)
    parameter.grad = None


@compiled
@pytest.mark.parametrize(
    ("kind", "summed"),
    [("plain", {0, 1}), ("twice", {0, 1}), ("another hook", {1}), ("sparse", {0}), ("freed in a hook", {1})],
)
def test_gradients_are_summed_when_they_arrive_where_nobody_can_change_them(kind, summed):
    weight, table = nn.Parameter(torch.randn(3)), nn.Embedding(4, 3, sparse=kind == "sparse")
    parameters = [weight, table.weight]
    _, (quick, _) = both(parameters)
    quick.summing = 1
    if kind == "freed in a hook":
        weight.register_post_accumulate_grad_hook(stepped)
    mark(quick, parameters)
    if kind == "another hook":
        weight.register_post_accumulate_grad_hook(scaled)
    for _ in range(2 if kind == "twice" else 1):
        (table(torch.tensor([1, 2])) * weight).sum().backward()
    reached, flags, sums, indices, gradients = quick.take()
    found = those(flags)
    assert (those(reached), set(found)) == ([0, 1], summed)
    for i in found:
        assert np.frombuffer(sums).reshape(2, 2)[i].tolist() == pytest.approx(
            [parameters[i].numel(), float(parameters[i].grad.double().square().sum())], rel=1e-12
        )
    left = [i for i in (0, 1) if i not in summed and parameters[i].grad is not None]
    assert indices == left
    assert all(gradient is parameters[i].grad for i, gradient in zip(indices, gradients, strict=True))
    assert quick.untouched() is True
    assert quick.rewritten([0, 1]) is False
    parameters[found[0]].grad.mul_(2.0)
    assert quick.rewritten([0, 1]) is True
    assert quick.take() == (b"\0\0", b"", b"", [], [])


@compiled
@pytest.mark.parametrize("change", ["in place", "replaced", "taken away"])
def test_a_gradient_that_changes_later_in_the_pass_is_read_when_it_ends(change):
    early, late = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    _, (quick, _) = both([early, late])
    quick.summing = 1
    mark(quick, (early, late))

    def meddle(_):
        assert early.grad is not None, "it has been accumulated"
        if change == "in place":
            early.grad.mul_(0.5)
        else:
            early.grad = early.grad * 0.5 if change == "replaced" else None

    late.register_hook(meddle)
    (early * (late * 1.0)).sum().backward()
    reached, summed, _, indices, gradients = quick.take()
    assert (those(reached), those(summed)) == ([0, 1], [1])
    assert indices == ([] if change == "taken away" else [0])
    assert all(gradient is early.grad for gradient in gradients)


@compiled
def test_a_pass_after_one_that_was_lost_begins_anew_wherever_it_begins():
    first, second, third = parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    owners, passes = both(parameters)
    for one in passes:
        mark(one, parameters)
    passes[0].summing = 1

    def lose(_):
        raise RuntimeError("lost")

    handle = first.register_hook(lose)
    with pytest.raises(RuntimeError, match="lost"):
        (second * (first * 1.0)).sum().backward()
    handle.remove()
    assert [owner.begun for owner in owners] == [1, 1], "it had reached one of them"
    (third * 2.0).sum().backward()
    assert [owner.begun for owner in owners] == [2, 2]
    assert [those(one.take()[0]) for one in passes] == [[1, 2]] * 2


@compiled
def test_a_pass_inside_a_pass_is_one_of_its_own():
    outer, inner = parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    owners, passes = both(parameters)
    for one in passes:
        mark(one, parameters)
    passes[0].summing = 1
    between = outer * 1.0

    def descend(_):
        with torch.enable_grad():
            (inner * 3.0).sum().backward()

    between.register_hook(descend)
    between.sum().backward()
    assert [owner.begun for owner in owners] == [2, 2]
    assert [those(one.take()[0]) for one in passes] == [[0, 1]] * 2


class Elsewhere(nn.Parameter):
    """Keeps its gradient where only its class knows."""

    @property
    def grad(self):
        return self.__dict__.get("kept")

    @grad.setter
    def grad(self, gradient):
        self.__dict__["kept"] = gradient


@compiled
def test_a_gradient_that_a_class_of_its_own_keeps_is_asked_of_that_class():
    odd = Elsewhere(torch.ones(2))
    _, passes = both([odd])
    odd.grad = torch.full((2,), 3.0)
    for one in passes:
        one.note(0)
        assert one.take()[4][0] is odd.grad
        assert one.rewritten([0]) is False
        odd.grad.mul_(2.0)
        assert one.rewritten([0]) is True


@compiled
def test_a_mark_goes_with_its_parameter():
    parameter = nn.Parameter(torch.ones(2))
    _, (quick, _) = both([parameter])
    mark(quick, [parameter])
    gone = weakref.ref(parameter._post_accumulate_grad_hooks)
    del parameter
    gc.collect()
    assert gone() is None, "though the mark and the dictionary hold each other"


@compiled
def test_wrong_indices_are_refused():
    _, (quick, _) = both([nn.Parameter(torch.ones(2))])
    for name in ("stepping", "rewritten"):
        with pytest.raises(TypeError, match=f"{name}\\(\\) takes a list of indices"):
            getattr(quick, name)(0)
    assert quick.stepping([7]) == ([], [], False)


@both_ways
def test_nodes_that_the_kernel_looks_at_are_told_of():
    """Otherwise a long chain of them would be freed by recursion, see `keelscope.unwinding`."""
    modules = [nn.Linear(3, 3), nn.ReLU()]
    told = []
    breaks = Breaks()
    breaks.cut, breaks.distance = told.append, 1
    owner = nn.Module()
    references = [weakref.ref(module) for module in modules]
    page = hooks.make_page(references, weakref.ref(owner), breaks, bytes([8, 1]), Batch())
    page.armed = 1
    outputs = [modules[0](torch.ones(2, 3))]
    outputs.append(modules[1](outputs[0]))
    assert all(page.look(site, modules[site], (torch.ones(2, 3),), {}, output) for site, output in enumerate(outputs))
    assert told == [outputs[0].grad_fn]  # nothing waits for the gradient of the other


@both_ways
def test_gradients_that_the_kernel_hands_on_count_as_arrived():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with ks.watch(model, sites="all") as watch:
        for step in range(2):
            model[step](torch.ones(2, 3)).sum().backward()  # of a sum: not contiguous
            watch.step()
    assert {entry.path: entry.status for entry in watch.coverage if entry.path == "1"} == {"1": "observed"}


@both_ways
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_inside_a_hook_reaches_the_user_and_a_fault_of_ours_does_not(error, monkeypatch):
    def cut(*_):
        raise error

    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    with ks.watch(model) as watch:
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            watch.step()
        monkeypatch.setattr(Breaks, "cut", cut)
        monkeypatch.setattr(Breaks, "distance", 1)
        with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else nullcontext():
            model(torch.ones(2, 3)).sum().backward()
