"""Models that change while they are watched: what is new is recorded from then on, beside what was there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope import kernel
from keelscope.changes import Gone, Tree, merged
from keelscope.sites import plan_sites


class Adapted(nn.Module):
    """A low-rank adapter around a layer, as PEFT puts it in place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 1)
        self.extra, self.uses_extra = nn.Linear(6, 6), False

    def forward(self, x):
        x = self.norm(self.body(x))
        return self.head(self.extra(x) if self.uses_extra else x)


@pytest.mark.parametrize("asked", ["kernel", "Python"])
def test_a_tree_sees_what_came_went_or_was_replaced_and_nothing_else(asked, monkeypatch):
    if asked == "Python":
        monkeypatch.setattr(kernel, "tree_of", lambda _: None)
    net = Net()
    tree = Tree(net)
    tries = {
        "nothing": lambda: None,
        "values": net.head.weight.detach().zero_,
        "a buffer": lambda: net.register_buffer("seen", torch.ones(1)),
        "a parameter in its place": lambda: setattr(net.head, "weight", nn.Parameter(torch.ones(1, 6))),
        "a parameter less": lambda: setattr(net.head, "bias", None),
        "a module in its place": lambda: swap_like_for_like(net),
        "a module less": lambda: remove_extra(net),
        "a module more": lambda: net.add_module("late", nn.ReLU()),
        "a parameter more": lambda: net.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "the same modules in another order": lambda: net._modules.update(norm=net._modules.pop("norm")),
    }
    found = {}
    for name, change in tries.items():
        change()
        found[name] = tree.changed(net), tree.changed(net)
    quiet = ("nothing", "values", "a buffer")
    assert found == {name: (name not in quiet, False) for name in tries}


def swap_head(net):
    net.head = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))


def swap_like_for_like(net):
    net.head = nn.Linear(6, 1)


def adapt(net):
    net.body = Adapted(net.body)


def call_extra(net):
    net.uses_extra = True


def remove_extra(net):
    del net.extra


def kept_outputs(net):
    """Of each module that is called, with their gradients; and the hooks that keep them."""
    outputs = {}

    def keep(path, out):
        if out.requires_grad:
            out.retain_grad()
            outputs[path] = out

    modules = net.named_modules()
    return outputs, [m.register_forward_hook(lambda _m, _in, out, path=path: keep(path, out)) for path, m in modules]


def train(net, steps, change=None, at=3, **options):
    """A loop that measures every gradient of a parameter and of a module's output by itself."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    truth = []
    with ks.watch(net, optimizer=optimizer, sites="all", **options) as watch:
        for step in range(steps):
            if change is not None and step in (at if isinstance(at, tuple) else (at,)):
                change(net)
                held = {id(p) for group in optimizer.param_groups for p in group["params"]}
                fresh = [p for p in net.parameters() if id(p) not in held]
                if fresh:
                    optimizer.add_param_group({"params": fresh})
            outputs, handles = kept_outputs(net)
            net(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            for handle in handles:
                handle.remove()
            found = {path: p.grad.norm().item() for path, p in net.named_parameters() if p.grad is not None}
            truth.append((found, {path: out.grad.norm().item() for path, out in outputs.items()}))
            optimizer.step()
            optimizer.zero_grad()
    return watch, truth


def check(run, truth, every, of_change=()):
    """Every number there is is true, and all are there; on the row of the change, outputs before it may be missing."""
    for key, kind in (("parameter_gradients/norm", 0), ("gradients/norm", 1)):
        series = run[key]
        assert series.steps.tolist() == list(range(0, len(truth), every))
        paths = [site.path for site in series.sites]
        assert len(paths) == len(set(paths))
        for step, row in zip(series.steps.tolist(), series.values, strict=True):
            got = {path: value for path, value in zip(paths, row, strict=True) if not np.isnan(value)}
            wanted = truth[step][kind]
            missing = wanted.keys() - got.keys()
            assert got.keys() <= wanted.keys()
            assert not missing or (step in of_change and kind == 1 and len(missing) == 1), (key, step, missing)
            assert got == pytest.approx({path: wanted[path] for path in got}, rel=1e-5)


@pytest.mark.parametrize("at", [0, 3, 4])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("change", [swap_head, swap_like_for_like, adapt, call_extra, remove_extra])
def test_numbers_are_right_before_and_after(change, every, at):
    torch.manual_seed(0)
    net = Net()
    watch, truth = train(net, 8, change, at, every=every)
    check(watch.run, truth, every, of_change=(at,))
    status = {(entry.path, entry.what): entry.status for entry in watch.coverage}
    for path in truth[-1][0]:
        assert status[path, "parameter"] == "observed"
    for path in truth[-1][1]:
        assert status[path, "module"] == "observed"


def exchange(net):
    net[1], net[3] = net[3], net[1]


def take_out(net):
    del net[1]


def take_out_last(net):
    del net[-1]


def put_in(net):
    net.insert(2, nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@pytest.mark.parametrize("at", [(0,), (1,), (3,), (4,), (2, 3), (3, 5)])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("change", [exchange, take_out, take_out_last, put_in])
def test_blocks_that_move_take_their_numbers_along(change, every, at):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
    watch, truth = train(net, 10, change, at, every=every)
    check(watch.run, truth, every)
    norms, seen = watch.run["parameters/norm"].values, watch.run.observed("parameters/norm")
    assert (np.isnan(norms) == ~seen).all(), "what went has no norm, and is not said to have one"


@pytest.mark.parametrize("every", [1, 2])
def test_what_stands_in_for_parameters_during_a_call_is_no_change(every):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with ks.watch(net, optimizer=optimizer, sites="all", every=every) as watch:
        for _ in range(5):
            doubled = {name: 2.0 * p for name, p in net.named_parameters()}
            torch.func.functional_call(net, doubled, (torch.ones(2, 4),)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = watch.run
    norms = run["parameter_gradients/norm"]
    known = {path for path, column in zip(norms.paths, norms.values.T, strict=True) if np.isfinite(column).all()}
    assert known == {name for name, _ in net.named_parameters() if not name.startswith("extra")}
    assert np.isfinite(run["outputs/rms"].of("body").values).all()


@pytest.mark.parametrize("change", [exchange, take_out, put_in])
def test_rows_that_wait_are_filed_where_they_were_recorded(change):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
    watch, truth = train(net, 10, change, 3, arm=ks.Arm(steps=3, before=2))
    check(watch.run, truth, 1)


def test_a_path_keeps_its_column():
    torch.manual_seed(0)
    watch, _ = train(Net(), 6, adapt)
    sites = [site.path for site in watch.run["parameter_gradients/norm"].sites]
    plain, _ = train(Net(), 2)
    before = [site.path for site in plain.run["parameter_gradients/norm"].sites]
    assert sites[: len(before)] == before
    assert set(sites[len(before) :]) == {"body.base.weight", "body.base.bias", "body.down.weight", "body.up.weight"}
    values = watch.run["gradients/norm"].of("body").values[:, 0]
    assert np.isfinite(values[[0, 1, 2, 4, 5]]).all(), "what stands at the path takes over"


@pytest.mark.parametrize("change", [swap_head, adapt])
def test_the_file_goes_on_and_is_resumed(tmp_path, change):
    torch.manual_seed(0)
    net, path = Net(), tmp_path / "run.h5"
    _, first = train(net, 6, change, path=path)
    _, second = train(net, 3, path=path, exists="resume", first_step=6)
    with ks.open_run(path) as run:
        check(run, first + second, 1, of_change=(3,))
        assert not run.notes
        assert {(e.path, e.status) for e in run.coverage} >= {(p, "observed") for p in second[-1][0]}


def test_training_is_what_it_would_have_been():
    def weights(*, watched):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        watch = ks.watch(net, optimizer=optimizer) if watched else None
        for step in range(6):
            if step == 2:
                adapt(net)
                optimizer.add_param_group({"params": [*net.body.down.parameters(), *net.body.up.parameters()]})
            net(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if watch is not None:
            watch.close()
        assert not any(module._forward_hooks for module in net.modules())
        return list(net.parameters())

    assert all(torch.equal(a, b) for a, b in zip(weights(watched=True), weights(watched=False), strict=True))


def test_a_change_is_seen_once():
    net = Net()
    tree = Tree(net)
    assert not tree.changed(net)
    for change in (swap_head, adapt, remove_extra):
        change(net)
        assert tree.changed(net)
        assert not tree.changed(net)
    net.norm.weight = nn.Parameter(torch.ones(6))
    assert tree.changed(net)


def test_what_stays_keeps_its_index_and_what_went_is_let_go_of():
    net = Net()
    plan = plan_sites(net, "all")
    adapt(net)
    grown = merged(plan, plan_sites(net, "all"))
    assert [w.site.path for w in grown.modules[: len(plan.modules)]] == [w.site.path for w in plan.modules]
    assert [w.site.path for w in grown.modules[len(plan.modules) :]] == ["body", "body.base", "body.down", "body.up"]
    assert type(grown.modules[[w.site.path for w in plan.modules].index("body")].module) is Gone


def test_a_module_that_moves_into_another_leaves_its_column():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with ks.watch(model, sites="all") as watch:
        for step in range(4):
            if step == 2:
                model[1] = nn.Sequential(model[1], nn.Tanh())
            model(torch.ones(2, 4)).square().sum().backward()
            model.zero_grad()
            watch.step()
    inner, outer = (watch.run["outputs/rms"].of(path).values for path in ("1.0", "1"))
    assert np.isnan(inner[:2]).all()
    assert np.isfinite(inner[2:]).all()
    assert np.isfinite(outer).all()
    assert (np.abs(outer[2:] - inner[2:]) > 1e-3).all(), "tanh changes what comes out of the path"
