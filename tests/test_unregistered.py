"""Trainable tensors in no registry: what is looked for, and how it is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.diagnosis import Severity
from keelscope.unregistered import find_unregistered


class Hidden(nn.Module):
    """Layers in a list, a dictionary in a tuple, and a tensor; beside them what is registered, frozen or computed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 1)
        self.layers = [nn.Linear(4, 4) for _ in range(2)]
        self.held = ({"a": nn.Linear(4, 4, bias=False)},)
        self.scale = torch.ones(4, requires_grad=True)
        self.again = [self.head, self.head.weight, self.layers[0]]
        self.teacher = [nn.Linear(4, 4).requires_grad_(requires_grad=False)]
        self.last = self.scale * 2
        self.constant = torch.ones(4)
        self.me = [self]

    def forward(self, x):
        for layer in (*self.layers, self.held[0]["a"]):
            x = layer(x).tanh()
        return self.head(x * self.scale)


PATHS = [
    "layers[0].weight", "layers[0].bias", "layers[1].weight", "layers[1].bias", "held[0]['a'].weight", "scale",
]  # fmt: skip


def test_each_is_found_once():
    model = Hidden()
    assert [held.path for held in find_unregistered(model.named_modules())] == PATHS


def test_nothing_is_found_in_a_sound_model():
    assert find_unregistered(nn.TransformerEncoderLayer(8, 2, batch_first=True).named_modules()) == ()


@pytest.mark.parametrize("steps", [1, 3])
def test_the_finding_names_them(steps):
    model = Hidden()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ks.watch(model, optimizer=optimizer) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        report = ks.diagnose(watch.run)
    (finding,) = [f for f in report.findings if f.rule == "unregistered_parameters"]
    assert (finding.severity, list(finding.sites)) == (Severity.WARNING, PATHS)


def test_a_second_model_without_gradient_is_only_noted():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model.spare = [nn.Linear(2, 2)]
    (finding,) = ks.report(model, torch.randn(8, 4), lambda output, _: output.square().mean()).findings
    assert (finding.rule, finding.severity) == ("unregistered_parameters", Severity.INFO)


def test_a_report_leaves_their_gradients_as_they_were():
    model = Hidden()
    model.scale.grad = torch.full((4,), 7.0)
    report = ks.report(model, torch.randn(8, 4), lambda output, _: output.square().mean())
    assert "unregistered_parameters" in {f.rule for f in report.findings}
    assert model.scale.grad.tolist() == [7.0] * 4
    assert model.layers[0].weight.grad is None
