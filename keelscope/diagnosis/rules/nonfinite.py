"""Rules on NaN and Inf: which module produced the first one, in the forward or in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.diagnosis.losses import BadLoss, bad_loss
from keelscope.diagnosis.nonfinite import NonfiniteHistory, innermost, nonfinite_history, skipped_steps
from keelscope.formatting import count, number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "nonfinite_backward", "nonfinite_forward"]


def nonfinite_forward(evidence: Evidence) -> Iterator[Finding]:
    """A module's output, or the loss computed from finite outputs, holds NaN or Inf.

    Formula: a logged training loss that is not finite on a step on which every watched output was; and, at the first
    recorded step with a non-finite output, the first flagged module in execution order that contains no other flagged
    one. Everything after it only passes the value on.

    Source: execution order instead of registration order, which blames whatever was built first.

    Remedy: look at that module's input and its operation (log, sqrt, division, overflow of half precision).

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding on the loss and one on a module.
    """
    loss = bad_loss(evidence)
    if loss is not None:
        yield _loss_finding(loss)
    history = nonfinite_history(evidence, "outputs")
    if history is None or not history.flags.any():
        return
    row = int(history.flags.any(axis=1).argmax())
    inner = innermost(history.paths, history.flags[row])
    producer = history.paths[inner[0]] or "(model)"
    yield _finding(
        "nonfinite_forward",
        history,
        f"The output of {producer} is the first with NaN or Inf in execution order, at step {history.steps[row]}; "
        f"{count(len(inner), 'module')} hold them on that step.",
        sites=(history.paths[inner[0]],),
        remedy="Look at its operation (log or division near 0, overflow of half precision)"
        f"{_computed_between(history.paths, inner[0])}, and at unwatched modules before it ({_unwatched(evidence)}"
        "sites='all' watches every one).",
    )


def _computed_between(paths: Sequence[str], place: int) -> str:
    """The module before the first flagged one, after which the model may compute without a module."""
    return f", at what is computed between {paths[place - 1]} and it" if place and paths[place - 1] else ""


def _unwatched(evidence: Evidence) -> str:
    """Modules without parts that the selection leaves out, the only ones that can have been passed over."""
    modules = [entry for entry in evidence.coverage if entry.what == "module"]
    holders = {entry.path.rpartition(".")[0] for entry in modules}
    left = [entry.path for entry in modules if entry.status == "not_selected" and entry.path not in holders]
    return f"{name_sites(left)}; " if left else ""


def _loss_finding(loss: BadLoss) -> Finding:
    return Finding(
        "nonfinite_forward",
        Severity.ERROR,
        f"The loss function itself produced {number(loss.value)}: scalars/{loss.name} is {number(loss.value)} at step "
        f"{loss.steps[0]}, while every watched output is finite on that step.",
        steps=(loss.steps[0], loss.steps[-1]),
        value=float(len(loss.steps)),
        threshold=0.0,
        remedy=_OF_NOTHING if loss.of_nothing else _INSIDE,
    )


_INSIDE = (
    "Look inside the loss: log, sqrt or division near 0 need an epsilon or a clamp, exp overflows, and half precision "
    "ends at 65504 (compute the loss in float32)."
)
_OF_NOTHING = (
    "Every gradient is exactly 0, so the mean was taken over nothing, 0/0: look whether all labels of the batch are "
    "ignored (ignore_index, -100) or its mask is empty, and leave such batches out."
)


def nonfinite_backward(evidence: Evidence) -> Iterator[Finding]:
    """A gradient holds NaN or Inf although the forward pass was finite.

    Formula: at the first recorded step with a non-finite output gradient and finite outputs, the flagged module that
    ran last: the gradient meets it first. What turned it non-finite lies between it and the next module towards the
    output whose own output gradient is finite. Steps that the loss scaler skipped, or on which the loss itself was not
    finite, do not count.

    Source: a gradient of sqrt, norm or log at 0 is Inf while its value is finite.

    Remedy: add an epsilon inside the root or the logarithm, or mask before it rather than after.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    history = nonfinite_history(evidence, "gradients")
    if history is None:
        return
    loss = bad_loss(evidence)
    explained = set(loss.steps) if loss is not None else set()
    ignored = skipped_steps(evidence) | _bad_forward_steps(evidence) | explained
    rows = [i for i in np.flatnonzero(history.flags.any(axis=1)) if int(history.steps[i]) not in ignored]
    if not rows:
        return
    row = int(rows[0])
    receiver = int(innermost(history.paths, history.flags[row])[-1])
    origin = _next_finite(history, row, receiver)
    between = f", after {history.paths[origin]}, whose output gradient is still finite" if origin >= 0 else ""
    sites = (history.paths[receiver],) if origin < 0 else (history.paths[receiver], history.paths[origin])
    yield _finding(
        "nonfinite_backward",
        history,
        f"The backward pass turns non-finite at the output of {history.paths[receiver] or '(model)'}{between}, "
        f"at step {history.steps[row]}; outputs are finite on that step.",
        sites=sites,
        remedy=f"Look at what runs between {_between(sites)}: sqrt, norm, log or division at 0 need an epsilon inside.",
    )


def _between(sites: tuple[str, ...]) -> str:
    return "these two modules" if len(sites) > 1 else "the output of this module and the loss, the loss included"


def _bad_forward_steps(evidence: Evidence) -> set[int]:
    history = nonfinite_history(evidence, "outputs")
    if history is None:
        return set()
    return {int(step) for step, row in zip(history.steps, history.flags, strict=True) if row.any()}


def _next_finite(history: NonfiniteHistory, row: int, receiver: int) -> int:
    """The next site in execution order that is not flagged and does not contain the receiver; -1 if there is none."""
    inside = history.paths[receiver]
    for index in range(receiver + 1, len(history.paths)):
        path = history.paths[index]
        if path and not history.flags[row, index] and not inside.startswith(f"{path}."):
            return index
    return -1


def _finding(rule: str, history: NonfiniteHistory, statement: str, *, sites: tuple[str, ...], remedy: str) -> Finding:
    bad = history.steps[history.flags.any(axis=1)]
    return Finding(
        rule,
        Severity.ERROR,
        statement,
        sites=sites,
        steps=(int(bad[0]), int(bad[-1])),
        value=float(len(bad)),
        threshold=0.0,
        remedy=remedy,
    )


RULES = (nonfinite_forward, nonfinite_backward)
