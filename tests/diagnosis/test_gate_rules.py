"""Rules on gates: which are closed, dead, asleep or saturated, with a numpy sigmoid as the reference."""

from __future__ import annotations

import numpy as np
import pytest

from keelscope.diagnosis import Severity, diagnose

GATE_RULES = {"gate_closed", "gate_dead", "saturated", "zero_grad_by_init", "zero_grad_stuck", "zero_gradient"}
DEPTH = 8


def found(run):
    return {finding.rule: finding for finding in diagnose(run).findings if finding.rule in GATE_RULES}


def sigmoid(logit):
    return 1.0 / (1.0 + np.exp(-np.asarray(logit, dtype=float)))


def gate(value, *, kind="gate (token)", slope=1.0, gradient=1e-3, ends=None):
    low, high = ends or (value, value)
    saturated = float(slope < 1e-3)
    return kind, {
        "value": value,
        "minimum": low,
        "maximum": high,
        "saturated_fraction": saturated,
        "gradient": gradient,
    }


def highway(stack, value, number=2, *, form="a x + b F(x)", on_shortcut=False, steps=(0,), norm=False, **options):
    """A stack of convex gates, the lowest `number` of them with the given value."""
    b = np.array([float(value)] * number + [0.3] * (DEPTH - number))
    b = 1 - b if on_shortcut else b
    values = stack.measure(DEPTH, alpha=np.ones(DEPTH) if form.startswith("x") else 1 - b, beta=b, post=norm)
    gates = {}
    for i in range(DEPTH):
        kind, row = gate(float(value) if i < number else 0.3, **options)
        gates[f"layers.{i // 2}.gate{i % 2}"] = (kind, [i], row)
    return stack.recorded(values, form=form, gates=gates, steps=steps, norm=norm)


def test_highway_gates_with_bias_minus_six_are_closed(stack):
    rules = found(highway(stack, sigmoid(-6)))
    assert set(rules) == {"gate_closed"}
    finding = rules["gate_closed"]
    assert finding.sites == ("layers.0.gate0", "layers.0.gate1")
    assert finding.value == pytest.approx(sigmoid(-6))
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize("bias", [-5.0, -7.0, -9.0, -12.0])
def test_a_convex_gate_of_one_parameter_counts_at_once(stack, bias):
    """LayerScale may start at 1e-6; a T of sigmoid(9) beside 1 - T is no start but a closed branch."""
    rules = found(highway(stack, sigmoid(bias), kind="learnable scalar", slope=sigmoid(bias) * sigmoid(-bias)))
    assert "gate_closed" in rules
    assert rules["gate_closed"].sites == ("layers.0.gate0", "layers.0.gate1")


@pytest.mark.parametrize("bias", [-3.0, -2.0, 0.0, 2.0])
def test_usual_gates_are_open(stack, bias):
    assert found(highway(stack, sigmoid(bias), number=DEPTH)) == {}


def test_a_gate_on_the_shortcut_closes_the_branch_at_one(stack):
    assert set(found(highway(stack, 0.999, on_shortcut=True))) == {"gate_closed"}
    assert found(highway(stack, 0.9, on_shortcut=True)) == {}


def test_what_keel_leaves_to_a_branch_is_no_closed_gate(stack):
    values = stack.measure(256, alpha=256 / 257, beta=1 / 257, post=True)
    row = gate(256 / 257, kind="learnable scalar")
    gates = {f"layers.{i // 2}.T{i % 2}": (row[0], [i], row[1]) for i in range(256)}
    form = "n(a x + b F(x))"
    assert found(stack.recorded(values, form=form, gates=gates, norm=True, steps=(5000,))) == {}
    assert set(found(stack.recorded(values, form="a x + b F(x)", gates=gates, steps=(5000,)))) == {"gate_closed"}


@pytest.mark.parametrize(("step", "closed"), [(0, False), (999, False), (1000, True)])
def test_small_parameters_are_closed_only_after_training(stack, step, closed):
    run = highway(stack, 1e-6, kind="learnable vector", steps=(step,), form="x + b F(x)")
    assert ("gate_closed" in found(run)) is closed


def test_entries_of_both_signs_are_open(stack):
    run = highway(stack, 0.0, kind="learnable vector", ends=(-0.5, 0.5), steps=(5000,), form="x + b F(x)")
    assert found(run) == {}


def test_a_weight_on_the_shortcut_alone_closes_no_branch(stack):
    assert found(highway(stack, 0.001, form="a x + F(x)", kind="learnable scalar", steps=(5000,))) == {}


def test_constants_are_not_judged(stack):
    assert found(highway(stack, 0.001, kind="constant", gradient=np.nan)) == {}


def sleeping(stack, *, kind="learnable scalar", gradient=0.02, branch=0.0, steps=(0,), value=1.0, slope=1.0):
    """Gates at T = 1 on the shortcut of two of eight sub-layers."""
    t = np.array([value] * 2 + [0.7] * (DEPTH - 2))
    values = stack.measure(DEPTH, alpha=t, beta=1 - t)
    gates, parameters = {}, {}
    for i in range(DEPTH):
        path = f"layers.{i // 2}.branch{i % 2}"
        made = gate(float(t[i]), kind=kind, gradient=gradient if i < 2 else 0.1, slope=slope if i < 2 else 0.2)
        gates[f"layers.{i // 2}.T{i % 2}"] = (made[0], [i], made[1])
        size = branch if i < 2 else 0.5
        parameters |= {f"{path}.weight": (1.0, size), f"{path}.bias": (0.5, size)}
    return stack.recorded(values, form="a x + b F(x)", gates=gates, parameters=parameters, steps=steps)


def test_a_raw_gate_at_one_sleeps_and_is_alive(stack):
    rules = found(sleeping(stack))
    assert set(rules) == {"zero_grad_by_init"}
    finding = rules["zero_grad_by_init"]
    assert finding.severity is Severity.INFO
    assert finding.sites == tuple(f"layers.0.branch{i}.{name}" for i in range(2) for name in ("weight", "bias"))
    assert (
        "2 weights (layers.0.T0 and layers.0.T1) multiply it by exactly 0 on its way there but get" in finding.statement
    )


def test_a_sigmoid_gate_at_saturation_is_dead(stack):
    value = float(np.float32(sigmoid(40.0)))
    assert value == 1.0
    rules = found(sleeping(stack, gradient=0.0, value=value, slope=float(value * (1 - value))))
    assert set(rules) == {"gate_dead", "saturated"}
    assert rules["gate_dead"].severity is Severity.ERROR
    assert (
        "2 gates (layers.0.T0 and layers.0.T1) let nothing through and get no gradient" in rules["gate_dead"].statement
    )
    assert rules["saturated"].sites == ("layers.0.T0", "layers.0.T1")


def test_a_constant_of_one_is_as_dead(stack):
    assert set(found(sleeping(stack, kind="constant", gradient=np.nan))) == {"gate_dead"}


def test_a_gate_at_one_whose_branch_has_a_gradient_does_not_sleep(stack):
    assert set(found(sleeping(stack, branch=1e-9))) <= {"gate_closed"}


def test_what_stays_asleep_is_stuck(stack):
    assert set(found(sleeping(stack, steps=(0, 1)))) == {"zero_grad_by_init"}
    rules = found(sleeping(stack, steps=(0, 5, 10)))
    assert set(rules) == {"zero_grad_stuck"}
    assert rules["zero_grad_stuck"].statement.startswith("For 10 steps the gradient has been exactly 0 in 4 parameters")


def plain(stack, parameters, steps=(0,)):
    return stack.recorded(stack.measure(4, beta=0.0), form="x + F(x)", parameters=parameters, steps=steps)


@pytest.mark.parametrize(
    ("parameters", "sleeping"),
    [
        (
            {"layers.0.alpha": (0.0, 0.3), "layers.0.f.weight": (1.0, 0.0), "layers.1.f.weight": (1.0, 0.2)},
            ["layers.0.f.weight"],
        ),
        ({"A": (1.0, 0.0), "B": (0.0, 0.4)}, ["A"]),
        (
            {
                "layers.0.conv1.weight": (1.0, 0.0),
                "layers.0.conv2.weight": (0.0, 0.3),
                "layers.0.conv1.bias": (0.0, 0.0),
                "layers.1.conv1.weight": (1.0, 0.1),
            },
            ["layers.0.conv1.weight", "layers.0.conv1.bias"],
        ),
    ],
    ids=["rezero", "lora", "fixup"],
)
def test_zero_initialisation_is_known_without_any_gate_recorded(stack, parameters, sleeping):
    rules = found(plain(stack, parameters))
    assert set(rules) == {"zero_grad_by_init"}
    assert list(rules["zero_grad_by_init"].sites) == sleeping


@pytest.mark.parametrize(
    "parameters",
    [
        {"layers.0.f.weight": (1.0, 0.0), "layers.0.f.bias": (0.0, 0.3)},
        {"layers.0.f.weight": (1.0, 0.0), "layers.1.alpha": (0.0, 0.3)},
        {"layers.0.f.weight": (1.0, 0.0), "head.weight": (0.0, 0.3)},
        {"layers.0.f.weight": (1.0, 0.0), "layers.0.alpha": (0.0, 0.0)},
    ],
    ids=["zero bias", "another block", "zero head", "dead weight"],
)
def test_a_zero_that_no_weight_explains_is_a_zero_gradient(stack, parameters):
    assert set(found(plain(stack, parameters))) == {"zero_gradient"}


@pytest.mark.parametrize(("slope", "closed"), [(1.0, False), (1e-4, True)])
def test_a_small_weight_behind_a_flat_sigmoid_is_closed_at_once(stack, slope, closed):
    run = highway(stack, 1e-4, kind="learnable vector", slope=slope, form="x + b F(x)")
    assert ("gate_closed" in found(run)) is closed
