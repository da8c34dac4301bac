from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from keelscope.diagnosis import Severity, diagnose
from keelscope.store.memory import MemoryWriter
from keelscope.store.schema import Row, SublayerInfo

N = 32


def sloped(total, n=N):
    return 1e-4 * 10.0 ** (total / n * np.arange(-n + 1, 1.0))


def found(run, rule):
    return [finding for finding in diagnose(run).findings if finding.rule == rule]


def test_a_healthy_run_has_no_finding(make_run):
    assert diagnose(make_run(sloped(-0.5), late=np.log10(sloped(-0.2)))).findings == ()


@pytest.mark.parametrize(("total", "rule", "limit"), [(3.2, "vanishing", 2.0), (-3.2, "exploding", -2.0)])
def test_slopes_beyond_two_decades(make_run, total, rule, limit):
    (finding,) = found(make_run(sloped(total)), rule)
    assert finding.severity is Severity.ERROR
    assert finding.value == pytest.approx(total)
    assert finding.threshold == limit
    assert finding.steps == (0, 0)
    assert finding.sites == tuple(f"layers.{i}" for i in range(11))  # more than 2 of 3.1 decades away
    assert found(make_run(sloped(total)), {"vanishing": "exploding"}.get(rule, "vanishing")) == []


def test_the_statement_has_number_limit_and_layers(make_run):
    (finding,) = found(make_run(sloped(3.2), parameter=sloped(2.4)), "vanishing")
    assert finding.statement == (
        "The gradient RMS shrinks by a fitted x6.31e-04 over 32 sub-layers: S = +3.20 decades, limit +2.00 (also "
        "parameter-gradient norm +2.40). 11 layers (layers.0 to layers.10) differ from the output end by more than 2 "
        "decades."
    )
    assert "Pre-LN" in finding.remedy


def test_what_only_late_tokens_show_is_said_to_be_hidden(make_run):
    (finding,) = found(make_run(sloped(-0.6), late=np.log10(sloped(4.5))), "vanishing")
    assert finding.statement.startswith("The late-token gradient level shrinks by a fitted x3.16e-05")
    assert "; the gradient RMS hides it (-0.60), since a few early tokens dominate." in finding.statement


def test_two_decades_exactly_are_no_finding(make_run):
    assert found(make_run(sloped(1.99)), "vanishing") == []


def test_knee(make_run):
    values = np.where(np.arange(N) < 20, 1e-6, 1e-4)
    (finding,) = found(make_run(values), "knee")
    assert finding.severity is Severity.WARNING
    assert finding.sites == ("layers.19", "layers.20")
    assert finding.value == pytest.approx(2.0)
    assert finding.statement == "The gradient RMS drops x0.0100 in one step, from layers.20 to layers.19."


def test_a_jump_is_a_knee_too(make_run):
    (finding,) = found(make_run(np.where(np.arange(N) < 20, 1e-2, 1e-4)), "knee")
    assert (finding.value, finding.threshold) == (pytest.approx(-2.0), -1.0)
    assert "jumps x100 in one step" in finding.statement


def test_the_step_after_the_first_block_is_by_design(make_run):
    values = np.ones(N)
    values[:2] = 1e3
    assert found(make_run(values), "knee") == []
    assert len(found(make_run(values, sublayers=2), "knee")) == 1  # there the first block is one layer


def test_a_steep_slope_alone_is_no_knee(make_run):
    assert found(make_run(10.0 ** np.linspace(-30, 0, 20)), "knee") == []


def test_uniformly_small(make_run):
    (finding,) = found(make_run(1e-9 * sloped(0), parameter=np.full(N, 1e-12)), "uniformly_small")
    assert finding.value < 1e-8 == finding.threshold
    assert "median RMS" in finding.statement
    assert "depth is not the cause" in finding.statement


def test_small_because_of_depth_is_not_uniformly_small(make_run):
    assert found(make_run(sloped(9), parameter=1e-9 * sloped(9)), "uniformly_small") == []


@pytest.mark.parametrize(
    ("variance", "severity", "words"),
    [
        (1 + np.arange(N), Severity.INFO, "about linear in depth"),
        (np.geomspace(1, 33, N), Severity.INFO, "exponentially (x1.12 per sub-layer)"),
        (np.geomspace(1, 200, N), Severity.WARNING, "exponentially (x1.19 per sub-layer)"),
        ((1.0 + np.arange(N)) ** 2, Severity.WARNING, "as depth to the power 2.00"),
        (np.geomspace(1, 3e4, N), Severity.WARNING, "exponentially"),
        (np.append(np.ones(N - 1), 1e3), Severity.WARNING, "faster than linear"),
    ],
)
def test_variance_growth(make_run, variance, severity, words):
    (finding,) = found(make_run(np.ones(N), variance=variance), "variance_growth")
    assert finding.severity is severity
    assert words in finding.statement
    assert finding.sites == ("layers.2", "layers.31")


def test_variance_that_norms_should_keep_level(make_run):
    run = make_run(np.ones(N), variance=1.0 + np.arange(N))
    layout = run._source.layout
    writer = MemoryWriter(replace(layout, info=replace(layout.info, sublayers=(SublayerInfo("n(x + F(x))"),) * N)))
    values = {g.name: {s.name: run[f"{g.name}/{s.name}"].values[0] for s in g.statistics} for g in layout.groups}
    writer.append(Row(0, 0.0, values))
    (finding,) = found(writer.run(), "variance_growth")
    assert finding.severity is Severity.WARNING
    assert "although norms on the sums should keep it level" in finding.statement


def test_steady_variance(make_run):
    assert found(make_run(np.ones(N), variance=np.linspace(1, 9, N)), "variance_growth") == []


def test_no_variance_rule_without_a_stack_or_outputs(make_run):
    assert found(make_run(np.ones(N), variance=np.geomspace(1, 1e6, N), stack=False), "variance_growth") == []
    assert found(make_run(np.ones(N), groups=("gradients",)), "variance_growth") == []
