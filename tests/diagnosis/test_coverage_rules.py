from __future__ import annotations

import numpy as np
import torch
from torch import nn

import keelscope as ks
from keelscope.diagnosis import Severity, diagnose
from keelscope.diagnosis.rules.coverage import owners_of
from keelscope.store.schema import CoverageEntry

N = 8


def table(**status):
    """Coverage of the parameters `layers.i.weight` and `.bias`; `status` by path with dots as double underscores."""
    given = {path.replace("__", "."): value for path, value in status.items()}
    paths = [f"layers.{i}.{name}" for i in range(N) for name in ("weight", "bias")]
    return [CoverageEntry(p, "parameter", given.get(p, "observed")) for p in paths]


def found(run, rule):
    return [finding for finding in diagnose(run).findings if finding.rule == rule]


def without(*rows):
    def edit(k, values, observed):
        for statistic in ("norm", "rms"):
            values["parameter_gradients"][statistic][list(rows)] = np.nan

    return edit


def test_owners_are_the_largest_modules_that_qualify_as_a_whole():
    everything = ["a.x.w", "a.x.b", "a.y.w", "c.w", "c.b", "d"]
    assert owners_of(["a.x.w", "a.x.b"], everything) == ("a.x",)
    assert owners_of(["a.x.w", "a.x.b", "a.y.w", "c.b", "d"], everything) == ("a", "c.b", "d")
    assert owners_of([], everything) == ()


def test_frozen_is_information(make_run):
    coverage = table(layers__0__weight="frozen", layers__0__bias="frozen")
    (finding,) = found(make_run(np.ones(N), coverage=coverage, edit=without(1, 2)), "frozen")
    assert (finding.severity, finding.sites, finding.value) == (Severity.INFO, ("layers.0",), 2.0)
    assert finding.statement == "Frozen (requires_grad is False): 2 parameters of layers.0."


def test_what_is_unfrozen_later_is_no_longer_frozen(make_run):
    coverage = table(layers__0__weight="frozen", layers__0__bias="frozen")
    assert found(make_run(np.ones(N), coverage=coverage), "frozen") == []


def test_disconnected_in_the_stack_is_an_error(make_run):
    coverage = table(layers__0__weight="disconnected", layers__0__bias="disconnected")
    (finding,) = found(make_run(np.ones(N), coverage=coverage, edit=without(1, 2)), "disconnected")
    assert (finding.severity, finding.sites) == (Severity.ERROR, ("layers.0",))
    assert finding.statement == "No gradient reaches 2 trainable parameters of layers.0, although the module ran."
    assert "detach()" in finding.remedy


def test_disconnected_beside_the_stack_is_a_warning(make_run):
    coverage = [*table(), CoverageEntry("aux.weight", "parameter", "disconnected")]
    (finding,) = found(make_run(np.ones(N), coverage=coverage), "disconnected")
    assert (finding.severity, finding.sites) == (Severity.WARNING, ("aux",))


def test_never_called(make_run):
    coverage = [*table(), *(CoverageEntry(f"spare.{p}", "parameter", "never_called") for p in ("weight", "bias"))]
    (finding,) = found(make_run(np.ones(N), coverage=coverage), "never_called")
    assert finding.severity is Severity.WARNING
    assert finding.statement == "The forward pass never ran spare (2 parameters)."


def test_coverage_gaps_are_listed_by_status_with_the_reason(make_run):
    coverage = [
        *table(),
        CoverageEntry("body", "module", "coverage_gap", "Its parameters received gradients, but no call was seen."),
        CoverageEntry("lazy.weight", "parameter", "uninitialized", "A lazy parameter that no forward has shaped yet."),
        CoverageEntry("list", "module", "container", "It only holds other modules."),
        CoverageEntry("act", "module", "not_selected", "The site selection leaves it out."),
    ]
    first, second = found(make_run(np.ones(N), coverage=coverage), "coverage_gap")
    assert first.statement == (
        "Not observed (coverage gap): 1 site (body). Its parameters received gradients, but no call was seen."
    )
    assert second.sites == ("lazy.weight",)


def test_no_backward(make_run):
    (finding,) = found(make_run(np.full((3, N), np.nan), parameter=np.nan, edit=without(0, -1)), "no_backward")
    assert finding.statement == "No gradient arrived on 3 recorded steps: only forward passes were seen."


def test_nan_gradients_are_a_backward(make_run):
    def edit(k, values, observed):
        values["gradients"]["rms"][:] = np.nan
        values["gradients"]["nonfinite_count"][:] = 1.0
        values["parameter_gradients"]["norm"][:] = np.nan
        values["parameter_gradients"]["rms"][:] = np.nan

    assert found(make_run(np.ones(N), edit=edit), "no_backward") == []


def test_zero_gradient_of_modules_names_the_one_nearest_the_loss(make_run):
    values = np.ones((2, N))
    values[:, :3] = 0.0
    (finding,) = found(make_run(values), "zero_gradient")
    assert finding.severity is Severity.ERROR  # as the headline: dead
    assert finding.sites == ("embedding", "layers.0", "layers.1", "layers.2")
    assert finding.statement == (
        "The output gradient is exactly 0 in 4 modules (embedding, layers.0, layers.1 and 1 more); nearest the loss: "
        "layers.2."
    )


def zero_parameters(*rows):
    def edit(k, values, observed):
        for statistic in ("norm", "rms"):
            values["parameter_gradients"][statistic][list(rows)] = 0.0

    return edit


def test_zero_gradient_of_a_weight(make_run):
    (finding,) = found(make_run(np.ones((2, N)), edit=zero_parameters(3)), "zero_gradient")
    assert (finding.severity, finding.sites) == (Severity.WARNING, ("layers.1.weight",))


def test_with_one_step_it_may_be_the_initialisation(make_run):
    (finding,) = found(make_run(np.ones(N), edit=zero_parameters(3)), "zero_gradient")
    assert finding.severity is Severity.INFO
    assert finding.statement.endswith("zero initialisation (ReZero, LoRA, Fixup) looks the same.")


def test_biases_may_be_zero_by_construction(make_run):
    (finding,) = found(make_run(np.ones((2, N)), edit=zero_parameters(2, 4)), "zero_gradient")
    assert (finding.severity, finding.value) == (Severity.INFO, 0.0)
    assert "2 biases (layers.0.bias and layers.1.bias)" in finding.statement


def test_zero_only_at_first_is_no_finding(make_run):
    def edit(k, values, observed):
        if k == 0:
            zero_parameters(3)(k, values, observed)

    assert found(make_run(np.ones((2, N)), edit=edit), "zero_gradient") == []


def test_underflow_is_not_a_zero_gradient(make_run):
    values = np.concatenate([[0.0, 0.0], np.geomspace(1e-40, 1e-2, N - 2)])
    assert found(make_run(values), "zero_gradient") == []


def test_findings_are_sorted_by_severity(make_run):
    coverage = [
        *table(),
        CoverageEntry("spare.w", "parameter", "never_called"),
        CoverageEntry("f.w", "parameter", "frozen"),
    ]
    values = 10.0 ** np.linspace(-9, 0, N)
    order = [finding.severity for finding in diagnose(make_run(values, coverage=coverage)).findings]
    assert order == sorted(order, reverse=True)
    assert order == [Severity.ERROR, Severity.WARNING, Severity.INFO]


class Routed(nn.Module):
    """A layer that asks one of two experts."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x):
        return x + self.experts[1](x)


def test_experts_that_nobody_chose_are_worth_knowing_only():
    layers = nn.ModuleList(Routed() for _ in range(5))
    with ks.watch(layers) as watch:
        x = torch.ones(2, 3)
        for layer in layers[:4]:
            x = layer(x)
        x.sum().backward()
        watch.step()
    (finding,) = found(watch.run, "never_called")
    assert (finding.severity, finding.sites[-1]) == (Severity.WARNING, "4")  # a whole layer of the stack
    with ks.watch(layers[:4]) as watch:
        x = torch.ones(2, 3)
        for layer in layers[:4]:
            x = layer(x)
        x.sum().backward()
        watch.step()
    (finding,) = found(watch.run, "never_called")
    assert (finding.severity, finding.sites[0], len(finding.sites)) == (Severity.INFO, "0.experts.0", 4)
