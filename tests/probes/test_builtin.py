"""The built-in probes: names that files and readers rely on, and their numbers on small known tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.probe import Tap, available_probes
from keelscope_probes import PROBES

NAMES = {
    "outputs": (Tap.OUTPUT, ["mean", "variance", "rms", "max_abs", "zero_fraction", "nonfinite_count"]),
    "inputs": (Tap.INPUT, ["mean", "variance", "rms", "max_abs", "zero_fraction", "nonfinite_count"]),
    "gradients": (
        Tap.OUTPUT_GRADIENT,
        ["norm", "rms", "max_abs", "zero_fraction", "nonfinite_count", "late_token_level", "late_token_zero_fraction"],
    ),
    "parameters": (Tap.PARAMETER, ["norm", "rms"]),
    "parameter_gradients": (Tap.PARAMETER_GRADIENT, ["norm", "rms"]),
    "tokens": (Tap.OUTPUT, ["cosine_similarity", "effective_rank"]),
    "attention": (Tap.ATTENTION, ["entropy", "entropy_share", "max_weight", "sink_mass"]),
    "updates": (Tap.UPDATE, ["norm", "ratio"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    probe = available_probes()[name]
    tap, statistics = NAMES[name]
    assert probe.tap is tap
    assert [statistic.name for statistic in probe.statistics] == statistics
    assert all(statistic.doc.endswith(".") and statistic.unit for statistic in probe.statistics)


def test_every_probe_of_the_package_is_found_once():
    names = [probe.name for probe in PROBES]
    assert len(names) == len(set(names))
    assert set(NAMES) <= set(names)
    assert set(names) <= set(available_probes())


class Scaled(nn.Module):
    """Output and gradient can be read off: y = w x with fixed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, 4.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def test_numbers():
    model = nn.Sequential(Scaled())
    x = torch.tensor([[[1.0, -1.0], [0.0, 2.0]]])  # [batch, position, feature]
    upstream = torch.tensor([[[5.0, 0.0], [0.6, 0.8]]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    probes = ["default", "inputs", "updates", "outputs+kurtosis"]
    with ks.watch(model, optimizer=optimizer, sites="0", probes=probes) as watch:
        (model(x) * upstream).sum().backward()
        optimizer.step()
    y, gradient = np.array([3.0, -4.0, 0.0, 8.0]), np.array([5.0, 0.0, 0.6, 0.8])
    of_weight = np.array([5.0, 1.6])  # sum of upstream * x
    wanted = {
        "outputs/mean": 1.75,
        "outputs/variance": y.var(),
        "outputs/rms": math.sqrt((y**2).mean()),
        "outputs/max_abs": 8,
        "outputs/zero_fraction": 0.25,
        "outputs/nonfinite_count": 0,
        "outputs/kurtosis": ((y - y.mean()) ** 4).mean() / y.var() ** 2,
        "inputs/mean": 0.5,
        "inputs/max_abs": 2,
        "inputs/zero_fraction": 0.25,
        "gradients/norm": np.linalg.norm(gradient),
        "gradients/rms": np.linalg.norm(gradient) / 2,
        "gradients/max_abs": 5,
        "gradients/zero_fraction": 0.25,
        "gradients/late_token_level": 0.0,
        "gradients/late_token_zero_fraction": 0.0,
        "parameters/norm": 5,
        "parameters/rms": 5 / math.sqrt(2),
        "parameter_gradients/norm": np.linalg.norm(of_weight),
        "parameter_gradients/rms": np.linalg.norm(of_weight) / math.sqrt(2),
        "updates/norm": 0.5 * np.linalg.norm(of_weight),
        "updates/ratio": 0.1 * np.linalg.norm(of_weight),
    }
    for key, number in wanted.items():
        assert watch.run[key].values[0, 0] == pytest.approx(number, rel=1e-6, abs=1e-6), key


def test_parameters_are_weighed_on_every_tenth_recorded_step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(model, optimizer=optimizer, every=2) as watch:
        for _ in range(44):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert watch.run["parameters/norm"].steps.tolist() == [0, 20, 40]
    assert watch.run["gradients/norm"].steps.tolist() == list(range(0, 44, 2))
