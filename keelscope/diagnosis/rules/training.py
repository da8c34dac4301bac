"""Rules on single steps and single parameters: one that owns the norm, spikes, skipped steps, sizes of updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.diagnosis.evidence import PARAMETER_GRADIENT
from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.diagnosis.nonfinite import skipped_steps
from keelscope.formatting import count, number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "dominated_by_one_parameter", "overflow_step_skipped", "spike", "update_ratio"]

_FEW = 4
_BEFORE, _LEAST = 128, 16
_FAR = 10.0
_TOTAL = "scalars/grad_norm_total"
_OFTEN = 0.25
_RATIO = "updates/ratio"
_SLOW = 1e-6


def dominated_by_one_parameter(evidence: Evidence) -> Iterator[Finding]:
    """One parameter makes up nearly all of the gradient's norm, so that clipping by norm scales all others down.

    Formula: its share of the summed squared gradient norms > 0.9, of four parameters or more.

    Source: rows of rare tokens in an embedding behind a norm (unslothai/unsloth#5207, marin-community/marin#1368); the
    total norm alone cannot say who made it.

    Remedy: clip that parameter by itself, or look at what makes it large (rare tokens, a tiny row before a norm).

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding, only worth knowing.
    """
    norms = evidence.recent(PARAMETER_GRADIENT)
    if norms is None:
        return
    known = np.flatnonzero(norms > 0)
    if known.size < _FEW or not np.isfinite(norms[evidence.observed(PARAMETER_GRADIENT).any(axis=0)]).all():
        return
    squares = np.square(norms[known] / norms[known].max())
    share, limit = float(1.0 / squares.sum()), evidence.thresholds["dominated"]
    if share <= limit:
        return
    path = evidence.sites(PARAMETER_GRADIENT)[int(known[squares.argmax()])].path
    yield Finding(
        "dominated_by_one_parameter",
        Severity.INFO,
        f"{path} alone makes up {100 * share:.0f} % of the squared gradient norm of {known.size} parameters: clipping "
        "by the total norm would scale all others by it.",
        sites=(path,),
        steps=_recent(evidence),
        value=share,
        threshold=limit,
        remedy="Clip it by itself, or look for what makes it large: rare tokens, a tiny row before a norm.",
    )


def spike(evidence: Evidence) -> Iterator[Finding]:
    """The gradient norm jumps far out of its own history on one of the recent steps.

    Formula: log10 of the total gradient norm of a step > mean + 6 standard deviations of the up to 128 recorded steps
    before it (16 at least), and more than twice their largest. A WARNING beyond ten times their median. Steps with NaN
    or Inf, and those that a loss scaler skipped, do not count.

    Source: 6 standard deviations over 128 steps as in OLMo-core; logarithms, since norms are not spread evenly.

    Remedy: skip or clip such steps; look at the batch, and at the parameter that grew most.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding, on the largest jump.
    """
    series = evidence.history(_TOTAL, _BEFORE + evidence.steps.size)
    if series is None:
        return
    steps, skipped = series.steps, skipped_steps(evidence)
    values = np.array(series.values, dtype=np.float64)
    values[[int(step) in skipped for step in steps]] = np.nan
    limit = evidence.thresholds["spike"]
    jumps = [(_deviations(values, row), row) for row in range(len(steps)) if steps[row] >= evidence.steps[0]]
    size, row = max(jumps, default=(0.0, -1))
    if size <= limit:
        return
    usual = float(np.nanmedian(values[max(0, row - _BEFORE) : row]))
    yield Finding(
        "spike",
        Severity.WARNING if values[row] > _FAR * usual else Severity.INFO,
        f"The gradient norm jumps to {number(float(values[row]))} at step {steps[row]}, from a median of "
        f"{number(usual)} before: {size:.0f} standard deviations of its logarithm.",
        steps=(int(steps[row]), int(steps[row])),
        value=size,
        threshold=limit,
        remedy="Clip the gradient or skip such steps, and look at the batch of that step.",
    )


def _deviations(values: NDArray[np.float64], row: int) -> float:
    """By how many standard deviations of the log a value lies above those before it; 0 where that says nothing."""
    before = values[max(0, row - _BEFORE) : row]
    before = before[np.isfinite(before) & (before > 0)]
    if before.size < _LEAST or not np.isfinite(values[row]) or not values[row] > 2 * before.max():
        return 0.0
    logs = np.log10(before)
    return float((np.log10(values[row]) - logs.mean()) / max(float(logs.std()), 1e-3))


def overflow_step_skipped(evidence: Evidence) -> Iterator[Finding]:
    """The loss scaler skipped optimizer steps because gradients overflowed.

    Formula: recorded steps that the scaler skipped among the recent ones. A few are how it finds its scale; more than a
    quarter of four steps or more is a WARNING.

    Source: dynamic loss scaling doubles its scale until half precision overflows, then halves it.

    Remedy: none for a few; else train in bfloat16, or find the layer whose outputs or gradients are that large.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    skipped = sorted(skipped_steps(evidence) & {int(step) for step in evidence.steps})
    if not skipped:
        return
    often = evidence.steps.size >= _FEW and len(skipped) > _OFTEN * evidence.steps.size
    yield Finding(
        "overflow_step_skipped",
        Severity.WARNING if often else Severity.INFO,
        f"The loss scaler skipped {len(skipped)} of {count(evidence.steps.size, 'recorded step')} because gradients "
        "overflowed.",
        steps=(skipped[0], skipped[-1]),
        value=float(len(skipped)),
        threshold=_OFTEN * evidence.steps.size,
        remedy="Use bfloat16, or find the layer whose outputs or gradients are that large."
        if often
        else "None needed: a few skipped steps are how the scaler finds its scale.",
    )


def update_ratio(evidence: Evidence) -> Iterator[Finding]:
    """Steps change the weights by too much or by next to nothing, against their size.

    Formula: median over weights with two axes or more, as far as their names tell (no bias, no norm), of
    norm(update) / norm(weight) on the recent steps: > 0.1, or < 1e-6. Warm-up is not told from a small learning rate.

    Source: about 1e-3 is usual (cs231n); 1e-1 to 1e-4 is the band of TheDeepChecker, widened at the low end, where
    warm-up and decay pass through.

    Remedy: lower the learning rate, or raise it.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding. Needs the probe ``updates``.
    """
    ratios = evidence.recent(_RATIO)
    if ratios is None:
        return
    paths = [site.path for site in evidence.sites(_RATIO)]
    counted = np.array([not path.endswith("bias") and "norm" not in path.lower() for path in paths], dtype=np.bool_)
    used = np.flatnonzero(counted & np.isfinite(ratios) & (ratios > 0))
    if used.size < _FEW:
        return
    middle, limit = float(np.median(ratios[used])), evidence.thresholds["update_ratio"]
    if _SLOW <= middle <= limit:
        return
    far = tuple(paths[i] for i in used if (ratios[i] > limit if middle > limit else ratios[i] < _SLOW))
    yield Finding(
        "update_ratio",
        Severity.WARNING,
        f"A step changes the weights by {number(middle)} of their size in the median ({name_sites(far)}), "
        f"{f'above {limit:g}' if middle > limit else f'below {_SLOW:g}'}; about 1e-3 is usual.",
        sites=far,
        steps=_recent(evidence),
        value=middle,
        threshold=limit if middle > limit else _SLOW,
        remedy="Lower the learning rate." if middle > limit else "Raise the learning rate, unless it is warming up.",
    )


def _recent(evidence: Evidence) -> tuple[int, int] | None:
    return (int(evidence.steps[0]), int(evidence.steps[-1])) if evidence.steps.size else None


RULES = (spike, overflow_step_skipped, update_ratio, dominated_by_one_parameter)
