"""Dead units and saturated entries, against counts over whole tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope_probes.activations import ACTIVATIONS, SATURATION


def watched(model, *batches, backward=True):
    with ks.watch(model, probes=["activations", "saturation", "outputs"]) as watch:
        for batch in batches:
            out = model(batch)
            if backward:
                out.square().mean().backward()
            watch.step()
        return watch.run


def values(run, name):
    series = run[name]
    return dict(zip(series.paths, series.values[0].tolist(), strict=True))


def test_shares_are_those_of_a_count_over_everything():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
    nn.init.normal_(model[0].bias, std=4.0)
    x = torch.randn(50, 6)
    run = watched(model, x)
    rectified = torch.relu(model[0](x))
    for site in ("1", "2"):  # the rectifier, and the layer that it feeds
        assert values(run, "activations/dead_fraction")[site] == (rectified == 0).all(0).double().mean().item()
        assert values(run, "activations/active_fraction")[site] == (rectified > 0).double().mean().item()
        assert values(run, "activations/samples")[site] == 50
        assert values(run, "activations/units")[site] == 40
    assert 0.1 < values(run, "activations/dead_fraction")["1"] < 0.9


def test_a_unit_that_fires_in_one_of_two_calls_is_alive():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    a, b = torch.randn(2, 3), torch.randn(5, 3)
    with ks.watch(model, probes="activations") as watch:
        (model(a).sum() + model(b).sum()).backward()
        watch.step()
        run = watch.run
    both = torch.relu(model[0](torch.cat([a, b])))
    assert values(run, "activations/dead_fraction")["1"] == (both == 0).all(0).double().mean().item()
    assert values(run, "activations/samples")["1"] == 7


@pytest.mark.parametrize(
    ("module", "shape", "unit"),
    [
        (nn.ReLU(), (4, 5), -1),
        (nn.ReLU(), (4, 7, 5), -1),
        (nn.ReLU(), (4, 5, 3, 3), 1),
        (nn.ReLU6(), (4, 5, 2, 3, 3), 1),
        (nn.Threshold(0.3, 0.0), (40, 5), -1),
        (nn.Hardswish(), (40, 5), -1),
        (nn.Conv1d(5, 1, 1), (4, 5, 9), 1),
        (nn.Conv2d(5, 1, 1), (5, 3, 3), 0),
        (nn.ConvTranspose3d(5, 1, 1), (4, 5, 2, 2, 2), 1),
    ],
)
def test_units_are_features_or_channels(module, shape, unit):
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0)) - 1.5
    seen = x if isinstance(module, nn.modules.conv._ConvNd) else module(x)
    (view,) = ACTIVATIONS.view((x,), module)
    other = [axis for axis in range(x.dim()) if axis != unit % x.dim()]
    np.testing.assert_array_equal((view == 0).flatten(0, -2).all(0), (seen == 0).amin(other))


@pytest.mark.parametrize("module", [nn.LeakyReLU(), nn.PReLU(), nn.RReLU(), nn.GELU(), nn.Threshold(0, 1), nn.ELU()])
def test_what_never_puts_out_zero_is_no_rectifier(module):
    assert not ACTIVATIONS.fits(module)


def test_of_wide_layers_256_units_are_read():
    x = torch.zeros(3, 1000)
    x[:, ::8] = 1.0
    (view,) = ACTIVATIONS.view((x,), nn.ReLU())
    assert view.shape == (3, 250)
    assert ACTIVATIONS.view((torch.zeros(2, 32, 40, 40),), nn.ReLU())[0].shape == (2, 8, 8, 32)
    assert ACTIVATIONS.view((torch.zeros(2, 500, 32),), nn.ReLU())[0].shape == (2, 63, 32)
    assert ACTIVATIONS.statistics[0].value(view) == 0.5  # every fourth is read, half of them multiples of 8


@pytest.mark.parametrize(("module", "slope"), [(nn.Sigmoid(), lambda y: y * (1 - y)), (nn.Tanh(), lambda y: 1 - y * y)])
def test_flat_entries_have_a_slope_below_a_thousandth(module, slope):
    x = torch.linspace(-12, 12, 200, dtype=torch.float64)
    (margin,) = SATURATION.view((x,), module)
    assert SATURATION.statistics[0].value(margin) == (slope(module(x)) < 1e-3).double().mean().item()


def test_flat_rows_of_a_softmax_give_one_weight_nearly_all():
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) * 8
    (margin,) = SATURATION.view((x,), nn.Softmax(dim=-1))
    expected = (x.double().softmax(-1).amax(-1) > 0.999).double().mean().item()
    assert 0.1 < expected < 0.9
    assert SATURATION.statistics[0].value(margin) == pytest.approx(expected, abs=1e-9)
    assert SATURATION.view((x[:, :1],), nn.Softmax(dim=-1)) is None


def test_data_is_left_out_and_sites_that_never_put_out_zero():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(64, 5)
    x[:, 2] = 0.0
    assert run_sites(watched(model, x)) == ["3", "4"]
    plain = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 1))
    assert "activations" not in watched(plain, x).groups


def run_sites(run):
    return list(run["activations/dead_fraction"].paths)


def test_hooks_are_there_on_the_steps_that_are_due_and_no_others():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    with ks.watch(model) as watch:
        counts = []
        for _ in range(12):
            model(torch.randn(4, 5)).sum().backward()
            counts.append(len(model[1]._forward_hooks) + len(model[1]._forward_pre_hooks))
            watch.step()
        run = watch.run
    assert [step for step, number in enumerate(counts) if number] == [0, 10]
    assert run["activations/dead_fraction"].steps.tolist() == [0, 10]
    assert "1" not in run["outputs/mean"].paths
    assert not model[1]._forward_hooks
