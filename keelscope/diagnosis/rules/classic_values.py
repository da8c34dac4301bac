"""The rule set ``classic``, everything but the size of gradients: loss, zeros, weights, updates and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.finding import Finding
from keelscope.diagnosis.limits import limit_finding, sized
from keelscope.formatting import number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES"]


def classic_loss(evidence: Evidence) -> Iterator[Finding]:
    """The loss is a thousand or more, or not a number.

    Formula: the last logged loss >= 1e3 or not finite.

    Source: AUTOTRAINER.

    Remedy: a lower learning rate.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    found = evidence.latest("scalars/loss")
    value = float(found[1]) if found is not None else 0.0
    if not value < 1e3:
        yield limit_finding(evidence, "classic_loss", f"The loss is {number(value)}.", (), value, 1e3)


def classic_all_zero(evidence: Evidence) -> Iterator[Finding]:
    """A tensor holds zeros only.

    Formula: RMS of a parameter gradient, or of an output, equal to 0.

    Source: AllZero of SageMaker Debugger; TorchLens' audit calls such a gradient dead.

    Remedy: see `zero_gradient`, `zero_grad_by_init` and `gate_dead`, which tell the causes apart.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding per kind of tensor.
    """
    for key in ("outputs/rms", "parameter_gradients/rms"):
        yield from sized(evidence, "classic_all_zero", key, "below", np.nextafter(0.0, 1.0))


def classic_dying_relu(evidence: Evidence) -> Iterator[Finding]:
    """Most entries of a gradient are exactly 0.

    Formula: share of exact zeros in an output gradient >= 0.7.

    Source: AUTOTRAINER, dying ReLU, which counts them in the gradients of weights.

    Remedy: a lower learning rate, or a leaky activation.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    yield from sized(evidence, "classic_dying_relu", "gradients/zero_fraction", "above", 0.7)


def classic_dead_layer(evidence: Evidence) -> Iterator[Finding]:
    """Most of what enters a layer is exactly 0.

    Formula: share of exact zeros in a module's input >= 0.7; the input of the first layer is data and does not count.

    Source: DeepDiagnosis, dead nodes (share of outputs <= 0 of an activation, which is what enters the next layer).

    Remedy: a lower learning rate, or a leaky activation.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    yield from sized(evidence, "classic_dead_layer", "inputs/zero_fraction", "above", 0.7, skip=1)


def classic_poor_initialisation(evidence: Evidence) -> Iterator[Finding]:
    """Neighbouring layers have weights of very different variance, in the first ten steps.

    Formula: ratio of the mean squares of the largest and the smallest weight (biases and norms left out: one axis or
    constant) > 10, where steps before 10 are recorded.

    Source: PoorWeightInitialization of SageMaker Debugger.

    Remedy: one initialisation rule for all layers.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    sizes = evidence.recent("parameters/rms")
    if sizes is None or not evidence.steps.size or evidence.steps[0] >= 10:
        return
    sites = evidence.sites("parameters/rms")
    weights = [(float(v) ** 2, s.path) for v, s in zip(sizes, sites, strict=True) if v > 0 and _is_matrix(s.path)]
    if len(weights) < 2:
        return
    (low, small), (high, large) = min(weights), max(weights)
    if high > 10 * low:
        text = f"The weights of {large} have {number(high / low)} times the mean square of those of {small}."
        yield limit_finding(evidence, "classic_poor_initialisation", text, (small, large), high / low, 10.0)


def classic_update_ratio(evidence: Evidence) -> Iterator[Finding]:
    """A step changes a parameter by more than ten times its size, or by next to nothing.

    Formula: norm of the update over norm of the parameter > 10 or < 1e-8.

    Source: WeightUpdateRatio of SageMaker Debugger.

    Remedy: change the learning rate.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding for either side.
    """
    yield from sized(evidence, "classic_update_ratio", "updates/ratio", "above", 10.0)
    yield from sized(evidence, "classic_update_ratio", "updates/ratio", "below", 1e-8)


def classic_large_output(evidence: Evidence) -> Iterator[Finding]:
    """A module's outputs are ten or more in size.

    Formula: RMS of an output >= 10.

    Source: AUTOTRAINER, mean absolute layer output.

    Remedy: normalise.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    yield from sized(evidence, "classic_large_output", "outputs/rms", "above", 10.0)


def _is_matrix(path: str) -> bool:
    """By name: weights of norms start constant and have no variance."""
    return path.endswith("weight") and "norm" not in path.lower()


RULES = (
    classic_loss,
    classic_all_zero,
    classic_dying_relu,
    classic_dead_layer,
    classic_poor_initialisation,
    classic_update_ratio,
    classic_large_output,
)
