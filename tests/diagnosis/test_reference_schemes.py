"""The reference schemes, recorded and judged: causes add up on every one, and the path rules are right about them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F

from keelscope import models
from keelscope.cli import list_command
from keelscope.diagnosis import diagnose
from keelscope.oneshot import record_once
from keelscope.text import Text

PATH_RULES = {
    "shortcut_attenuated",
    "residual_absorbed",
    "idle_depth",
    "norm_kills_gradient",
    "gate_closed",
    "gate_dead",
}
HAS_PATHS = "residual_gradients" in {row["name"] for row in list_command.probes()}
pytestmark = pytest.mark.skipif(not HAS_PATHS, reason="needs the probe of sub-layers")


def report_of(name, **options):
    batch = Text.read(Path(__file__).parents[2] / "LICENSE").batch(0, 8, 32, seed=0)

    def loss(output, pair):
        return F.cross_entropy(output.flatten(0, 1), pair[1].flatten())

    return diagnose(record_once(models.build(name, **options), batch, loss, probes=["default", "sublayers"]))


def found(report):
    return {finding.rule for finding in report.findings} & PATH_RULES


@pytest.mark.parametrize("depth", [16, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 256))])
@pytest.mark.parametrize("name", sorted(models.SCHEMES))
def test_the_causes_add_up_to_the_measured_total(name, depth):
    report = report_of(name, depth=depth)
    for stream in report.paths.streams:
        values = stream.values
        known = np.flatnonzero(np.isfinite(values["input_gradient"]) & np.isfinite(values["output_gradient"]))
        if known.size:
            measured = np.log10(values["input_gradient"][known[0]] / values["output_gradient"][known[-1]])
            totals = stream.attribution.totals
            assert sum(totals.values()) - totals["embedding"] == pytest.approx(measured, abs=1e-6)


@pytest.mark.parametrize("name", ["post_ln", "hybrid_norm", "highway"])
def test_lossy_shortcuts_are_attenuated(name):
    assert found(report_of(name, depth=64)) == {"shortcut_attenuated"}


@pytest.mark.parametrize("name", ["keel", "keel_gate", "pre_ln", "deepnorm", "ngpt", "rezero", "layerscale", "peri_ln"])
def test_healthy_schemes_get_no_finding_on_paths(name):
    assert found(report_of(name, depth=64)) == set()


def test_a_post_ln_at_a_small_initialisation_is_no_finding():
    assert found(report_of("post_ln", depth=64, init="normal")) == set()
