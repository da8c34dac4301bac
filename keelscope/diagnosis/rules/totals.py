"""Rules on the gradient of a whole step: steps that stand out, steps that a loss scaler skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.diagnosis.evidence import PARAMETER_GRADIENT
from keelscope.diagnosis.finding import Finding, Severity
from keelscope.diagnosis.nonfinite import skipped_steps
from keelscope.formatting import count, number, times

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "overflow_step_skipped", "spike"]

_TOTAL = "scalars/grad_norm_total"
_HISTORY = 128
_LEAST_HISTORY = 8
_DEVIATIONS = 6.0
_NORMAL = 1.4826  # median absolute deviation of a normal distribution -> its standard deviation


def spike(evidence: Evidence) -> Iterator[Finding]:
    """The total gradient norm of a step stands far out of the steps before it.

    Formula: total norm above 10 times the median of up to 128 recorded steps before it, and of the last 8 (a norm that
    grows step by step is no spike); log10 of it above the former by 6 deviations (1.4826 times the median absolute
    deviation); at least 8 steps before it. Steps that a loss scaler skipped, and norms that are not finite, do not
    count.

    Source: 6 standard deviations over 128 steps in OLMo-core's stability monitor; median and deviation of logarithms
    instead, since one spike inflates mean and standard deviation and norms spread over decades.

    Remedy: look at the batch of that step and at the parameter named; clip, warm up longer, or lower the learning rate.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding, on the highest spike.
    """
    blocks = list(evidence.blocks(_TOTAL))
    if not blocks:
        return
    steps = np.concatenate([block.steps for block in blocks])
    norms = np.concatenate([block.values for block in blocks])
    ignored = skipped_steps(evidence)
    usable = np.isfinite(norms) & (norms > 0) & ~np.isin(steps, sorted(ignored))
    steps, norms = steps[usable], norms[usable]
    limit = evidence.thresholds["spike"]
    heights = _heights(norms, limit)
    found = np.flatnonzero(heights > 0)
    if not found.size:
        return
    top = int(found[heights[found].argmax()])
    culprit = _largest_at(evidence, int(steps[top]))
    by = f", most of it in {culprit}" if culprit else ""
    yield Finding(
        "spike",
        Severity.WARNING,
        f"The total gradient norm jumps on {count(int(found.size), 'step')}; highest at step {steps[top]}: "
        f"{number(float(norms[top]))}, {times(float(np.log10(heights[top])))} the median before it{by}.",
        sites=(culprit,) if culprit else (),
        steps=(int(steps[found[0]]), int(steps[found[-1]])),
        value=float(heights[top]),
        threshold=limit,
        remedy="Look at the batch of that step; clip gradients, warm up longer or lower the learning rate.",
    )


def _heights(norms: NDArray[np.float64], limit: float) -> NDArray[np.float64]:
    """``[step]``: norm over the median of those before, where it is a spike; 0 elsewhere."""
    heights = np.zeros_like(norms)
    logs, decades = np.log10(norms), float(np.log10(limit))
    if logs.size <= _LEAST_HISTORY:
        return heights
    lately = np.median(np.lib.stride_tricks.sliding_window_view(logs[:-1], _LEAST_HISTORY), axis=1)
    for i in _LEAST_HISTORY + np.flatnonzero(logs[_LEAST_HISTORY:] - lately > decades):
        before = logs[max(0, i - _HISTORY) : i]
        middle = float(np.median(before))
        spread = _NORMAL * float(np.median(np.abs(before - middle)))
        height = float(logs[i] - max(middle, lately[i - _LEAST_HISTORY]))
        if height > decades and logs[i] - middle > _DEVIATIONS * spread:
            heights[i] = 10.0**height
    return heights


def _largest_at(evidence: Evidence, step: int) -> str:
    """Path of the parameter with the largest gradient of a step; empty if it was not recorded."""
    for block in evidence.blocks(PARAMETER_GRADIENT):
        rows = np.flatnonzero(block.steps == step)
        if rows.size and np.isfinite(block.values[rows[0]]).any():
            return block.paths[int(np.nanargmax(block.values[rows[0]]))]
    return ""


def overflow_step_skipped(evidence: Evidence) -> Iterator[Finding]:
    """A loss scaler saw non-finite gradients, skipped the step and lowered its scale: no fault of the model.

    Formula: sum of scalars/skipped_attempts (attempts that left no row) and scalars/skipped (rows on which the
    optimizer did nothing). WARNING when more than half of the attempts of the recent steps were skipped.

    Source: mixed-precision training begins with a scale that is too large on purpose; overflow that does not end means
    that gradients do not fit half precision.

    Remedy: none for single ones; for lasting ones a lower initial scale, bfloat16, or clipping.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    skipped = _counts(evidence, "scalars/skipped_attempts") + _counts(evidence, "scalars/skipped")
    if not skipped:
        return
    recent = sum(times_ for step, times_ in skipped if step in set(evidence.steps.tolist()))
    lasting = recent > evidence.steps.size
    total, steps = sum(times_ for _, times_ in skipped), [step for step, _ in skipped]
    yield Finding(
        "overflow_step_skipped",
        Severity.WARNING if lasting else Severity.INFO,
        f"The loss scaler skipped {count(total, 'attempt')} with non-finite gradients, first at step {min(steps)}, and "
        "lowered its scale.",
        steps=(min(steps), max(steps)),
        value=float(total),
        threshold=0.0,
        remedy="Begin with a lower scale, clip gradients, or use bfloat16." if lasting else "None needed.",
    )


def _counts(evidence: Evidence, key: str) -> list[tuple[int, int]]:
    """Step and number, where it is not 0."""
    return [
        (int(step), int(value))
        for block in evidence.blocks(key)
        for step, value in zip(block.steps, block.values, strict=True)
        if value > 0
    ]


RULES = (spike, overflow_step_skipped)
