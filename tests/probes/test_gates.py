"""Gates and residual weights: found, valued and differentiated as float64 autograd says, on every gated scheme."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import keelscope
from keelscope.models import build

TOKENS = torch.arange(12).reshape(2, 6) % 7
CLOSE = {"rtol": 1e-6, "atol": 1e-12}


def scheme(name: str, depth: int = 4, **options) -> nn.Module:
    return build(name, depth=depth, width=8, heads=2, vocabulary=7, **options).double()


def loss_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def recorded(model: nn.Module, *, steps: int = 1, lr: float = 0.1, probes=("gates",), loss=loss_of):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with keelscope.watch(model, optimizer=optimizer, probes=list(probes)) as watch:
            for _ in range(steps):
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
            return watch.run


def gate(run, path: str, statistic: str) -> np.ndarray:
    return run[f"gates/{statistic}"].of(path).values[:, 0]


def paths(run) -> dict[str, str]:
    return {site.path: site.kind for site in run.groups["gates"].sites} if "gates" in run.groups else {}


def reference(model: nn.Module, loss=loss_of) -> dict[str, float]:
    """Gradient norms of parameters, by autograd."""
    gradients = torch.autograd.grad(loss(model), list(model.parameters()), allow_unused=True)
    names = [name for name, _ in model.named_parameters()]
    return {n: float(g.norm()) for n, g in zip(names, gradients, strict=True) if g is not None}


PARAMETER_GATES = [
    ("rezero", {}, "alpha", "learnable scalar", lambda p: p),
    ("skipinit", {"alpha": 0.3}, "alpha", "learnable scalar", lambda p: p),
    ("layerscale", {}, "scale", "learnable vector", lambda p: p),
    ("fixup", {}, "multiplier", "learnable scalar", lambda p: p),
    ("highway", {}, "gate.bias", "learnable scalar", torch.sigmoid),
    ("highway", {"gate": "vector"}, "gate.bias", "learnable vector", torch.sigmoid),
    ("keel_gate", {}, "gate.bias", "learnable scalar", lambda p: p),
    ("keel_gate", {"activation": "clamp"}, "gate.bias", "learnable scalar", lambda p: p.clamp(0, 1)),
    ("keel_gate", {"activation": "sigmoid"}, "gate.bias", "learnable scalar", torch.sigmoid),
    ("keel_gate", {"gate": "vector", "gate_init": 1.0}, "gate.bias", "learnable vector", lambda p: p),
    ("keel", {"alpha_learnable": True, "first_block": "none"}, "alpha", "learnable scalar", lambda p: p),
    ("keel_ablation", {"stage": 2, "alpha": 1.0}, "beta", "learnable vector", lambda p: p),
]


@pytest.mark.parametrize(("name", "options", "parameter", "kind", "function"), PARAMETER_GATES)
def test_parameters_of_every_gated_scheme(name, options, parameter, kind, function):
    model = scheme(name, **options)
    wanted = {f"sublayers.{i}.{parameter}": kind for i in range(4)}
    values = {path: function(model.get_parameter(path).detach().clone()) for path in wanted}
    gradients = reference(model)
    run = recorded(model, steps=2)
    assert paths(run) == wanted
    for path, weights in values.items():
        assert gate(run, path, "value")[0] == pytest.approx(float(weights.mean()), rel=1e-12)
        assert gate(run, path, "minimum")[0] == float(weights.min())
        assert gate(run, path, "maximum")[0] == float(weights.max())
        assert gate(run, path, "gradient")[0] == pytest.approx(gradients[path], rel=1e-9, abs=1e-300)
        assert np.isfinite(gate(run, path, "gradient")).all()
    assert [info.gates for info in run.info.sublayers] == [(path,) for path in wanted]


@pytest.mark.parametrize("activation", ["raw", "clamp", "sigmoid"])
def test_later_steps_use_the_parameters_of_the_step(activation):
    model = scheme("keel_gate", activation=activation)
    path, seen, gradients = "sublayers.2.gate.bias", [], []

    def loss(model):
        alone = copy.deepcopy(model)  # a second backward pass through the watched one would count
        seen.append(alone.get_submodule("sublayers.2.gate")(None).item())
        gradients.append(reference(alone)[path])
        return loss_of(model)

    run = recorded(model, steps=3, lr=0.05, loss=loss)
    np.testing.assert_allclose(gate(run, path, "value"), seen, rtol=1e-12)
    np.testing.assert_allclose(gate(run, path, "gradient"), gradients, rtol=1e-9)
    assert len(set(seen)) == 3


@pytest.mark.parametrize("name", ["highway", "keel_gate"])
@pytest.mark.parametrize("activation", ["raw", "sigmoid"])
def test_token_gates_from_the_first_step_on(name, activation):
    options = {"gate": "token"} | ({"activation": activation} if name == "keel_gate" else {})
    model = scheme(name, **options)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    seen, gradients = [], []

    def loss(model):
        alone, made = copy.deepcopy(model), []
        alone.get_submodule("sublayers.1.gate").register_forward_hook(lambda _m, _i, output: made.append(output))
        gradients.append(float(torch.autograd.grad(loss_of(alone), made)[0].norm()))
        seen.append(made[0].detach())
        return loss_of(model)

    run = recorded(model, steps=3, loss=loss)
    assert paths(run) == {f"sublayers.{i}.gate": "gate (token)" for i in range(4)}
    np.testing.assert_allclose(gate(run, "sublayers.1.gate", "value"), [float(t.mean()) for t in seen], **CLOSE)
    np.testing.assert_allclose(gate(run, "sublayers.1.gate", "minimum"), [float(t.min()) for t in seen], **CLOSE)
    np.testing.assert_allclose(gate(run, "sublayers.1.gate", "maximum"), [float(t.max()) for t in seen], **CLOSE)
    np.testing.assert_allclose(gate(run, "sublayers.1.gate", "gradient"), gradients, rtol=1e-9)
    assert (gate(run, "sublayers.1.gate", "saturated_fraction") == 0).all()


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [("keel", "alpha", 4.0), ("deepnorm", "alpha", 2**0.5), ("ln_scaling", "entry", 2**-0.5), ("pre_ln", "", 1.0)],
)
def test_constants_have_a_value_and_nothing_else(name, place, value):
    run = recorded(scheme(name), steps=2)
    if name == "pre_ln":
        assert paths(run) == {}
        assert all(info.gates == () and info.beta == 1.0 for info in run.info.sublayers)
        return
    path = f"sublayers.3.branch:{place}"
    assert paths(run)[path] == "constant"
    np.testing.assert_allclose(gate(run, path, "value"), [value, value], rtol=1e-7)
    assert np.isnan(gate(run, path, "gradient")).all()
    assert np.isnan(gate(run, path, "saturated_fraction")).all()
    assert run.groups["gates"].provenance["constants"] == "as in the first recorded step"


def test_a_raw_gate_at_one_silences_branches_and_is_alive():
    run = recorded(scheme("keel_gate", gate_init=1.0), probes=("gates", "parameter_gradients"))
    norms = run["parameter_gradients/norm"]
    branches = [site.path for site in norms.sites if ".branch." in site.path]
    assert len(branches) > 8
    assert all(norms.of(path).values[0, 0] == 0 for path in branches)
    for i in range(4):
        assert gate(run, f"sublayers.{i}.gate.bias", "gradient")[0] > 0
        assert gate(run, f"sublayers.{i}.gate.bias", "saturated_fraction")[0] == 0


def test_a_sigmoid_gate_at_one_is_dead_and_stays_so():
    run = recorded(scheme("keel_gate", gate_init=1.0, activation="sigmoid"), steps=3)
    for i in range(4):
        path = f"sublayers.{i}.gate.bias"
        assert (gate(run, path, "gradient") == 0).all()
        assert (gate(run, path, "saturated_fraction") == 1).all()
        assert (gate(run, path, "value") == 1).all()


def test_rezero_is_alive_at_the_first_step():
    run = recorded(scheme("rezero"), probes=("gates", "parameter_gradients"))
    norms = run["parameter_gradients/norm"]
    assert all(norms.of(s.path).values[0, 0] == 0 for s in norms.sites if ".branch." in s.path)
    assert all(gate(run, f"sublayers.{i}.alpha", "gradient")[0] > 0 for i in range(4))
    assert all(gate(run, f"sublayers.{i}.alpha", "saturated_fraction")[0] == 0 for i in range(4))


def test_a_clamped_gate_beyond_its_bounds_is_stuck():
    model = scheme("keel_gate", activation="clamp")
    with torch.no_grad():
        for value, i in zip((1.2, 1.0, -0.1, 0.5), range(4), strict=True):
            model.get_parameter(f"sublayers.{i}.gate.bias").fill_(value)
    run = recorded(model)
    found = [gate(run, f"sublayers.{i}.gate.bias", "saturated_fraction")[0] for i in range(4)]
    assert found == [1, 0, 1, 0]
    assert [gate(run, f"sublayers.{i}.gate.bias", "gradient")[0] == 0 for i in range(4)] == [True, False, True, False]


def test_the_gate_of_keel_is_keel():
    """n(T h + (1 - T) F) = n(alpha h + F) with alpha = T / (1 - T)."""
    keel, gated = scheme("keel", first_block="none"), scheme("keel_gate")
    weights = {name: value for name, value in keel.state_dict().items() if name in gated.state_dict()}
    gated.load_state_dict(weights, strict=False)
    assert loss_of(gated).item() == pytest.approx(loss_of(keel).item(), rel=1e-4)
    run = recorded(gated)
    share = gate(run, "sublayers.1.gate.bias", "value")[0]
    assert share / (1 - share) == pytest.approx(4.0, rel=1e-6)
