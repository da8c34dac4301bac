"""Dead units and saturated activations: what is found, and what healthy models do not set off."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.diagnosis import Severity


def squared(output, _):
    return output.square().mean()


def findings(model, batch, loss=squared):
    return [f for f in ks.report(model, batch, loss).findings if f.rule in {"dead_units", "saturated", "zero_gradient"}]


def plain(width=64, depth=4, dead=0):
    """Linear, ReLU, Linear, ...; `dead` units of the second layer are shut."""
    torch.manual_seed(0)
    sizes = [8, *[width] * depth]
    pairs = itertools.pairwise(sizes)
    parts = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairs]
    with torch.no_grad():
        parts[1][0].bias[:dead] = -100.0
    return nn.Sequential(*(part for layer in parts for part in layer), nn.Linear(width, 1))


BATCH = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))


def test_a_layer_that_is_dead_altogether_is_one_finding():
    (finding,) = findings(plain(dead=64), BATCH)
    assert (finding.rule, finding.severity, finding.sites) == ("dead_units", Severity.ERROR, ("3",))
    assert "the gradient is exactly 0 in 2 modules (0 and 2); nearest the loss: 2" in finding.statement


class Functional(nn.Module):
    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        nn.init.constant_(self.b.bias, bias)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x).relu()).relu()).relu())


def test_a_rectifier_without_a_module_is_seen_where_its_output_goes():
    (finding,) = [f for f in findings(Functional(-9.0), BATCH) if f.severity is Severity.ERROR]
    assert (finding.rule, finding.sites) == ("dead_units", ("b",))
    assert findings(Functional(0.0), BATCH) == []


@pytest.mark.parametrize(("dead", "severity"), [(64, None), (168, Severity.INFO), (208, Severity.WARNING)])
def test_part_of_the_units(dead, severity):
    found = findings(plain(256, dead=dead), BATCH)
    assert [f.severity for f in found] == ([] if severity is None else [severity])
    assert [f.sites for f in found] == ([] if severity is None else [("3",)])


def test_few_samples_say_nothing_of_part_of_the_units():
    assert findings(plain(256, dead=208), BATCH[:32]) == []


def test_multiplying_by_zero_is_no_dead_unit():
    class Zero(nn.Module):
        def forward(self, x):
            return x * 0.0

    model = nn.Sequential(nn.Linear(8, 8), Zero(), nn.Linear(8, 8))
    assert {f.rule for f in findings(model, BATCH)} == {"zero_gradient"}


class Sparse(nn.Module):
    """A sparse autoencoder: of 4096 latents 4 are kept for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encode, self.act, self.decode = nn.Linear(8, 4096), nn.ReLU(), nn.Linear(4096, 8)

    def forward(self, x):
        h = self.act(self.encode(x))
        return self.decode(h * (h >= h.topk(4, dim=-1).values[..., -1:]))


def deep(depth=40, width=64):
    """He initialisation without norms: over depth all samples come to point the same way, and half of the units die."""
    model = plain(width, depth)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            nn.init.zeros_(module.bias)
    return model


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 4),
    )  # fmt: skip


def dropped():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 128), nn.ReLU(), nn.Dropout(0.8), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
    )


def squeezed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Sigmoid(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8), nn.Softmax(-1))


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Sparse, BATCH),
        (deep, BATCH),
        (convolutional, torch.rand(16, 3, 12, 12, generator=torch.Generator().manual_seed(2))),
        (dropped, BATCH),
        (squeezed, BATCH),
        (lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU()), (torch.arange(8) == 0).float().expand(64, 8)),  # pixels
    ],
    ids=["sparse", "deep", "convolutional", "dropped", "squeezed", "data"],
)
def test_healthy_models_set_nothing_off(model, batch):
    assert [str(f) for f in findings(model(), batch) if f.severity > Severity.INFO] == []


@pytest.mark.parametrize(
    ("activation", "kind"), [(nn.Sigmoid(), "Sigmoid"), (nn.Tanh(), "Tanh"), (nn.Softmax(-1), "Softmax")]
)
def test_a_saturated_activation_is_named(activation, kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 1))
    with torch.no_grad():
        model[0].weight.mul_(100)
    (finding,) = findings(model, BATCH)
    assert (finding.rule, finding.severity, finding.sites) == ("saturated", Severity.WARNING, ("1",))
    assert f"1 ({kind}) is saturated in up to" in finding.statement


def test_a_model_that_is_sure_after_long_training_is_only_noted():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))
    with torch.no_grad():
        model[0].weight.mul_(1000)
    with ks.watch(model, every=1000) as watch:
        for _ in range(1001):
            model(BATCH[:2]).square().mean().backward()
            watch.step()
        run = watch.run
    severities = [
        f.severity for step in (0, 1000) for f in ks.diagnose(run, step=step).findings if f.rule == "saturated"
    ]
    assert severities == [Severity.WARNING, Severity.INFO]
