"""What was observed, what was not, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keelscope as ks


class Net(nn.Module):
    """One module of every fate."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.plain, self.never, self.direct = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.wasted, self.cut, self.lazy = nn.Linear(4, 4), nn.Linear(4, 4), nn.LazyLinear(2)
        self.parts = nn.ModuleList([nn.Linear(4, 4)])
        self.own = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.plain(self.frozen(x)) * self.own
        self.wasted(x)
        x = x + self.cut(x).detach()
        x = x + nn.functional.linear(x, self.direct.weight, self.direct.bias)
        return self.parts[0](x)


def statuses(sites="all", backward: bool = True, **options) -> dict[str, tuple[str, str]]:
    model = Net()
    with ks.watch(model, sites=sites, **options) as watch:
        output = model(torch.ones(2, 4))
        if backward:
            output.sum().backward()
        watch.step()
    return {f"{entry.path}:{entry.what[0]}": (entry.status, entry.reason) for entry in watch.coverage}


def test_every_fate_has_its_word():
    found = statuses()
    wanted = {
        ":m": "observed",
        "frozen:m": "frozen",
        "frozen.weight:p": "frozen",
        "plain:m": "observed",
        "plain.weight:p": "observed",
        "never:m": "never_called",
        "never.weight:p": "never_called",
        "direct:m": "coverage_gap",
        "direct.weight:p": "observed",
        "wasted:m": "disconnected",
        "wasted.weight:p": "disconnected",
        "cut:m": "disconnected",
        "cut.weight:p": "disconnected",
        "lazy:m": "never_called",
        "lazy.weight:p": "uninitialized",
        "parts:m": "container",
        "parts.0:m": "observed",
        "own:p": "observed",
        "unused:p": "disconnected",
    }
    assert {key: found[key][0] for key in wanted} == wanted


def test_everything_is_listed_once_and_reasons_are_sentences():
    model = Net()
    found = statuses()
    assert len(found) == len(list(model.named_modules())) + len(list(model.named_parameters()))
    for status, reason in found.values():
        assert (reason == "") == (status == "observed")
        assert not reason or reason.endswith(".")


def test_without_backward():
    found = statuses(backward=False)
    assert found["plain:m"][0] == "observed"
    assert found["plain.weight:p"][0] == "no_backward"
    assert found["frozen.weight:p"][0] == "frozen"
    assert found["never:m"][0] == "never_called"


def test_selection_leaves_modules_out():
    found = statuses(sites="plain")
    assert found["plain:m"][0] == "observed"
    assert found["wasted:m"] == ("not_selected", "The site selection leaves it out.")
    assert found["parts:m"][0] == "container"
    assert found["wasted.weight:p"][0] in {"disconnected", "never_called"}
    assert found["own:p"][0] == "observed"


@pytest.mark.parametrize(
    ("probes", "module", "parameter"),
    [
        ("outputs", "observed", "not_selected"),
        ("gradients", "observed", "not_selected"),
        (["outputs", "parameter_gradients"], "observed", "observed"),
        ("parameters", "observed", "not_selected"),
    ],
)
def test_what_no_probe_looked_for_is_not_judged(probes, module, parameter):
    found = statuses(probes=probes)
    assert found["plain:m"][0] == module
    assert found["plain.weight:p"][0] == parameter
    assert found["frozen.weight:p"][0] == "frozen"
    if parameter == "not_selected":
        assert found["unused:p"][1] == "No probe on gradients of parameters was asked for."


def test_coverage_grows_with_the_steps():
    model = Net()
    with ks.watch(model, sites="all") as watch:
        for step in range(2):
            x = model(torch.ones(2, 4)) if step == 0 else model.never(torch.ones(2, 4))
            x.sum().backward()
            watch.step()
            if step == 0:
                assert of_modules(watch)["never"] == "never_called"
    assert of_modules(watch)["never"] == "observed"


def of_modules(watch: ks.Watch) -> dict[str, str]:
    return {entry.path: entry.status for entry in watch.coverage if entry.what == "module"}


def test_what_was_unfrozen_after_its_step_was_frozen_on_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(requires_grad=False)
    with ks.watch(model) as watch:
        for step in range(2):
            model[0].requires_grad_(requires_grad=step > 0)
            model(torch.ones(1, 2)).sum().backward()
            watch.step()
    first, second = (ks.diagnose(watch.run, step=step) for step in range(2))
    assert [(f.rule, f.sites) for f in first.findings] == [("frozen", ("0",))]
    assert second.findings == ()
    assert {entry.status for entry in watch.coverage if entry.what == "parameter"} == {"observed"}


def test_coverage_knows_the_step_that_is_not_closed_yet():
    model = nn.Linear(2, 1)
    with ks.watch(model) as watch:
        model(torch.ones(1, 2)).sum().backward()
        watch.step()
        assert {entry.status for entry in watch.coverage} == {"observed"}
        watch.log(loss=1.0)
        assert watch.run["scalars/loss"].values.tolist() == [1.0]


def test_a_parameter_that_was_assigned_anew_is_followed():
    model = nn.Linear(2, 1)
    with ks.watch(model) as watch:
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            watch.step()
            if step == 0:
                model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
    said = [(entry.path, entry.status) for entry in watch.coverage if entry.what == "parameter"]
    assert said == [("weight", "observed"), ("bias", "observed")]
    assert watch.run["parameter_gradients/norm"].of("bias").values.tolist() == [[1.0], [1.0]]


def test_what_was_taken_out_of_the_model_is_not_called_frozen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].bias.requires_grad_(requires_grad=False)
    with ks.watch(model) as watch:
        model[1] = nn.Identity()
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            watch.step()
    found = {entry.path: entry for entry in watch.coverage if entry.what == "parameter"}
    assert {path: entry.status for path, entry in found.items()} == {
        "0.weight": "observed",
        "0.bias": "frozen",
        "1.weight": "not_observed",
        "1.bias": "not_observed",
        "2.weight": "observed",
        "2.bias": "observed",
    }
    assert "no longer part of the model" in found["1.weight"].reason


def test_a_module_that_left_no_other_behind_is_still_listed():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with ks.watch(model) as watch:
        for step in range(3):
            if step == 1:
                del model[-1]
            model(torch.ones(2, 4)).sum().backward()
            watch.step()
    found = {entry.path: entry for entry in watch.coverage}
    assert [found[path].status for path in ("2", "3", "3.weight")] == ["observed", "not_observed", "not_observed"]
    assert found["3"].reason == found["3.weight"].reason == "Its module is no longer part of the model."


def test_what_came_when_the_run_had_no_more_room_is_not_called_observed(tmp_path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def grow(watch):
        for _ in range(20):
            model(torch.ones(2, 4)).sum().backward()
            watch.step()
            model.append(nn.Linear(4, 4))
        watch.close()

    watch = ks.watch(model, tmp_path / "run.h5")
    with pytest.warns(ks.errors.RecordingWarning, match="New sites"):
        grow(watch)
    status = {entry.path: entry.status for entry in watch.coverage}
    with ks.open_run(watch.path) as run:
        held = set(run["outputs/rms"].paths)
    assert 4 < len(held) < 23
    assert {path for path in status if status[path] == "observed" and path.isdigit()} == held


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_scripted_layer_that_no_gradient_reaches():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 1))
    with ks.watch(model) as watch:
        model[1](model[0](torch.ones(1, 2)).detach()).sum().backward()
        watch.step()
    assert {e.path: e.status for e in watch.coverage if e.what == "parameter"}["1.weight"] == "observed"


class Routed(nn.Module):
    """Two experts, of which one is chosen, and a layer that is used without being called."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))
        self.held = nn.Linear(2, 2)

    def forward(self, x):
        return self.experts[1](x) + (x @ self.held.weight).detach()


def test_what_did_not_run_inside_a_module_that_ran_was_never_called():
    model = nn.Sequential(Routed(), nn.Linear(2, 1))
    with ks.watch(model, sites=["0"]) as watch:
        model(torch.ones(1, 2)).sum().backward()
        watch.step()
    said = {entry.path: entry.status for entry in watch.coverage if entry.what == "parameter"}
    assert said["0.experts.0.0.weight"] == "never_called"
    assert said["0.experts.1.0.weight"] == "observed"
    assert said["0.held.weight"] == "never_called"  # used, but not as a module, and in vain


class Late(nn.Module):
    """A layer that first runs in step 3."""

    def __init__(self):
        super().__init__()
        self.first, self.late = nn.Linear(3, 3), nn.Linear(3, 3)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        x = self.first(x)
        return self.late(x) if self.steps > 3 else x


@pytest.mark.parametrize("sealing", [True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_the_stored_coverage_is_that_of_all_rows(tmp_path, in_file, sealing):
    model = Late()
    model.first.weight.requires_grad = False
    pace = ks.Pace() if sealing else ks.Pace(seal="never")
    options = {"pace": pace} if in_file else {}
    with ks.watch(model, tmp_path / "run.h5" if in_file else None, **options) as watch:
        for step in range(6):
            model.first.weight.requires_grad = step > 4
            model(torch.randn(2, 3)).sum().backward()
            watch.step()
            if step == 1:
                early = {entry.path: entry.status for entry in watch.run.coverage}
    assert early["late"] == early["late.weight"] == "never_called"
    assert early["first.weight"] == "frozen"
    run = ks.open_run(tmp_path / "run.h5") if in_file else watch.run
    assert run.coverage == watch.coverage
    assert {entry.status for entry in run.coverage if entry.path} == {"observed"}
