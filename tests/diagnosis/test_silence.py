from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.diagnosis import Severity, diagnose
from keelscope.store.schema import CoverageEntry

N = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + 0.1 * torch.tanh(self.inner(x))


class Cut(nn.Module):
    """24 blocks; the graph is cut after some of them."""

    def __init__(self, after=()):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(N))
        self.head = nn.Linear(8, 1)
        self.after = after

    def forward(self, x):
        x = self.embedding(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = x.detach() if i in self.after else x
        return self.head(x)


def report_of(model, steps=2):
    with ks.watch(model) as watch:
        for _ in range(steps):
            model(torch.randn(4, 8)).square().mean().backward()
            watch.step()
            model.zero_grad()
        return diagnose(watch.run)


def rules(report):
    return {finding.rule: finding for finding in report.findings}


@pytest.mark.parametrize(("after", "missing"), [(5, 6), (11, 12), (20, 21), (23, 24)])
def test_a_cut_graph_is_dead_up_to_the_cut(after, missing):
    report = report_of(Cut((after,)))
    assert report.headline == "dead"
    assert report.sentence.startswith(
        f"No gradient reaches {missing} of 24 layers, although they are trainable: it stops at blocks.{after}, the one "
        "nearest the loss."
    )
    finding = rules(report)["disconnected"]
    assert finding.severity is Severity.ERROR
    assert finding.sites[0] in {f"blocks.{after}", "blocks"}  # all of them: their container
    assert "nearest the loss" in finding.statement
    assert not {"vanishing", "exploding"} & rules(report).keys()


def test_figures_are_about_the_part_with_a_gradient():
    report = report_of(Cut((11,)))
    shape = report.profiles["gradients/rms"].shape
    assert (shape.covered, shape.length, shape.is_partial) == (12.0, 24.0, True)
    assert shape.total == pytest.approx(12 * shape.slope)
    assert "In the 12 layers that get one, gradient RMS has S = " in report.sentence


def test_a_few_layers_are_a_finding_only():
    report = report_of(Cut((3,)))
    assert report.headline == "flat"
    assert "over 20 blocks of 24, the part that gets a gradient" in report.sentence
    assert rules(report)["disconnected"].sites[0] == "blocks.3"


@pytest.mark.parametrize("number", [12, 24])
def test_frozen_layers_are_no_alarm(number):
    model = Cut()
    model.embedding.requires_grad_(requires_grad=False)
    for block in model.blocks[:number]:
        block.requires_grad_(requires_grad=False)
    report = report_of(model)
    assert report.headline == ("flat" if number < N else "not enough data")
    assert all(finding.severity is Severity.INFO for finding in report.findings)


def test_a_cut_above_frozen_layers_counts_the_trainable_ones():
    model = Cut((11,))
    for block in model.blocks[:3]:
        block.requires_grad_(requires_grad=False)
    assert report_of(model).sentence.startswith("No gradient reaches 9 of 24 layers")


def test_the_part_with_a_gradient_may_still_vanish(make_run):
    values = np.where(np.arange(N) < 4, np.nan, 10.0 ** np.linspace(-9, 0, N))
    coverage = [CoverageEntry(f"layers.{i}.weight", "parameter", "frozen") for i in range(4)]
    report = diagnose(make_run(values, coverage=coverage))
    assert report.headline == "vanishing"
    assert report.profile.shape.total == pytest.approx(9 * 20 / 23)
    assert "over 20 sub-layers of 24, the part that gets a gradient" in report.sentence
    assert "over 20 sub-layers of 24" in rules(report)["vanishing"].statement


@pytest.mark.parametrize("sign", [1, -1])
def test_nothing_is_extrapolated_over_zeros(make_run, sign):
    values = 10.0 ** (sign * np.linspace(-3, 0, N))
    values[:12] = 0.0  # what is left spans 1.4 decades
    report = diagnose(make_run(np.tile(values, (2, 1))))
    assert report.headline == "dead"
    assert not {"vanishing", "exploding"} & rules(report).keys()
    assert report.profile.shape.total == pytest.approx(sign * 3 * 12 / 23)


class Dead(nn.Sequential):
    """12 x (Linear, ReLU); the bias of one Linear shuts its ReLU."""

    def __init__(self, shut):
        torch.manual_seed(0)
        super().__init__(*(part for _ in range(12) for part in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 8))
        nn.init.constant_(self[2 * shut].bias, -50.0)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("shut", [3, 6, 10])
def test_a_dead_stack_has_the_error_that_its_headline_says(shut, steps):
    model = Dead(shut)
    with ks.watch(model) as watch:
        for _ in range(steps):
            model(torch.randn(4, 32)).square().mean().backward()
            watch.step()
        report = diagnose(watch.run)
    assert report.headline == "dead"
    errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
    assert (errors[0].rule, errors[0].sites) == ("dead_units", (f"{2 * shut + 1}",))
    assert shut == 3 or len(errors) == 1  # the 9 layers above the third do lose more than 2 decades
    assert f"nearest the loss: {2 * shut}." in errors[0].statement
    assert "zero initialisation" not in errors[0].statement


def test_zero_branches_of_a_live_stream_may_be_the_initialisation():
    model = Cut()
    for block in model.blocks:
        nn.init.zeros_(block.inner.weight)
        block.gate = nn.Parameter(torch.zeros(()))
        block.forward = lambda x, block=block: x + block.gate * torch.tanh(block.inner(x) + 1.0)
    report = report_of(model, steps=1)
    assert report.headline == "flat"
    assert {finding.rule: finding.severity for finding in report.findings} == {"zero_grad_by_init": Severity.INFO}


def test_a_zero_head_at_the_start_may_be_the_initialisation():
    model = Cut()
    nn.init.zeros_(model.head.weight)
    assert rules(report_of(model, steps=1))["zero_gradient"].severity is Severity.INFO
    assert rules(report_of(model, steps=3))["zero_gradient"].severity is Severity.ERROR
