"""The rule set ``classic``, gradients: the absolute thresholds of the field, for those who are used to them.

Opt-in, by ``diagnose(run, rules="classic")`` or ``keelscope report --rules classic``. They look at one tensor or at the
first and the last one, so that they move with loss scale, batch size and width, and know nothing of depth; the page on
verdicts shows how often they are right. Where a rule was defined on a mean absolute value, the root mean square is
used, which is recorded and at least as large. Each is a function as in the other files and gives `Finding` records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.evidence import PARAMETER_GRADIENT
from keelscope.diagnosis.finding import Finding, name_sites
from keelscope.diagnosis.limits import limit_finding, sized
from keelscope.diagnosis.nonfinite import nonfinite_history
from keelscope.formatting import count, number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES"]

_GRADIENT_SIZE = "parameter_gradients/rms"


def classic_exploding_tensor(evidence: Evidence) -> Iterator[Finding]:
    """Any recorded tensor holds NaN or Inf.

    Formula: a non-finite entry in an output, an output gradient or a parameter gradient, on any step so far.

    Source: ExplodingTensor of SageMaker Debugger.

    Remedy: see `nonfinite_forward` and `nonfinite_backward`, which name the origin.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    bad: list[str] = []
    for group in ("outputs", "gradients", "parameter_gradients"):
        history = nonfinite_history(evidence, group)
        if history is not None:
            bad += [history.paths[index] for index in np.flatnonzero(history.flags.any(axis=0))]
    if bad:
        sites = tuple(dict.fromkeys(bad))
        text = f"NaN or Inf in {count(len(sites), 'tensor')} ({name_sites(sites)})."
        yield limit_finding(evidence, "classic_exploding_tensor", text, sites, float(len(sites)), 0.0)


def classic_vanishing_gradient(evidence: Evidence) -> Iterator[Finding]:
    """A parameter's gradient is smaller than 1e-7.

    Formula: RMS of a parameter gradient < 1e-7, exact zeros included.

    Source: VanishingGradient of SageMaker Debugger (mean absolute value), copied by DeepDiagnosis; TorchLens' audit
    has the same limit on norms.

    Remedy: as for `vanishing`, if depth is to blame.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    yield from sized(evidence, "classic_vanishing_gradient", _GRADIENT_SIZE, "below", 1e-7)


def classic_small_gradient(evidence: Evidence) -> Iterator[Finding]:
    """A parameter's gradient is smaller than 1e-6.

    Formula: RMS of a parameter gradient < 1e-6.

    Source: TheDeepChecker, vanishing gradient (mean absolute value).

    Remedy: as for `vanishing`, if depth is to blame.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    yield from sized(evidence, "classic_small_gradient", _GRADIENT_SIZE, "below", 1e-6)


def classic_first_against_last(evidence: Evidence) -> Iterator[Finding]:
    """The first weight's gradient is tiny, in itself and against the last one.

    Formula: norm of the first weight's gradient < 1e-4, and less than 1e-3 of that of the last weight.

    Source: AUTOTRAINER, gradient vanish.

    Remedy: as for `vanishing`, if depth is to blame.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    first, last, paths = _ends(evidence)
    if first < 1e-4 and first < 1e-3 * last:
        text = f"The gradient of {paths[0]} is {number(first)}, of {paths[1]} {number(last)}."
        yield limit_finding(evidence, "classic_first_against_last", text, paths, first / last, 1e-3)


def classic_large_gradient(evidence: Evidence) -> Iterator[Finding]:
    """A parameter's gradient is larger than 1e6.

    Formula: RMS of a parameter gradient > 1e6.

    Source: TheDeepChecker, exploding gradient (mean absolute value).

    Remedy: as for `exploding`, if depth is to blame.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    yield from sized(evidence, "classic_large_gradient", _GRADIENT_SIZE, "above", 1e6)


def classic_exploding_operation(evidence: Evidence) -> Iterator[Finding]:
    """The gradient at a module's output has a norm of more than 1e4.

    Formula: norm of an output gradient > 1e4.

    Source: TorchLens, audit of gradients.

    Remedy: as for `exploding`, if depth is to blame.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    yield from sized(evidence, "classic_exploding_operation", "gradients/norm", "above", 1e4)


def classic_first_over_last(evidence: Evidence) -> Iterator[Finding]:
    """The first weight's gradient is 70 times as large as the last one's.

    Formula: norm of the first weight's gradient over that of the last > 70.

    Source: AUTOTRAINER, gradient explode.

    Remedy: as for `exploding`, if depth is to blame.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    first, last, paths = _ends(evidence)
    if first > 70 * last:
        text = f"The gradient of {paths[0]} is {number(first)}, of {paths[1]} {number(last)}."
        yield limit_finding(evidence, "classic_first_over_last", text, paths, first / last if last else np.inf, 70.0)


def _ends(evidence: Evidence) -> tuple[float, float, tuple[str, ...]]:
    """Gradient norms of the first and the last weight, and their paths; NaN where there are none."""
    norms = evidence.recent(PARAMETER_GRADIENT)
    if norms is None:
        return float("nan"), float("nan"), ()
    sites = evidence.sites(PARAMETER_GRADIENT)
    pairs = [(float(norm), site.path) for site, norm in zip(sites, norms, strict=True) if np.isfinite(norm)]
    weights = [(norm, path) for norm, path in pairs if path.endswith("weight")]
    if len(weights) < 2:
        return float("nan"), float("nan"), ()
    return weights[0][0], weights[-1][0], (weights[0][1], weights[-1][1])


RULES = (
    classic_exploding_tensor,
    classic_vanishing_gradient,
    classic_small_gradient,
    classic_first_against_last,
    classic_large_gradient,
    classic_exploding_operation,
    classic_first_over_last,
)
