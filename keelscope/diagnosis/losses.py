"""Steps on which the loss function itself produced NaN or Inf: the outputs were finite, the logged loss was not.

Used by the headline and the rules on NaN and Inf, beside `nonfinite`, which knows the same of modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from keelscope.diagnosis.nonfinite import nonfinite_history, skipped_steps
from keelscope.store.names import LOGGED_NAN

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["BadLoss", "bad_loss"]

_HELD_OUT = frozenset({"val", "valid", "validation", "dev", "eval", "test"})
_BEFORE = 3  # rows with a loss before a hole in it says something
_OFTEN = 10


@dataclass(frozen=True, slots=True)
class BadLoss:
    """A logged loss that was not finite although the model's outputs were."""

    name: str
    """Of the scalar."""
    steps: tuple[int, ...]
    value: float
    """On the first of these steps."""
    of_nothing: bool = False
    """Whether every gradient is exactly 0 beside a NaN, as of a mean over no element: all labels are ignored."""


def bad_loss(evidence: Evidence) -> BadLoss | None:
    """The logged training loss that was first to turn non-finite over finite outputs.

    A NaN in a scalar may also mean that nothing was logged. It counts if a mark beside it says that NaN was logged and
    no number ever came, if the gradients of that step, or the outputs or
    gradients of the next row, are non-finite, or if it is a lone hole in a loss logged on nine rows of ten; and if no
    row before lacks a loss without such a reason, and any row has one. Steps that a loss scaler skipped do not count.

    Args:
        evidence: a run at one step.

    Returns:
        Name, steps and value; None if there is none.
    """
    if "losses" not in evidence.kept:
        names = [name for name in evidence.run.scalars if _is_loss(name) and not name.startswith(LOGGED_NAN)]
        found = [bad for name in names if (bad := _scan(evidence, name)) is not None]
        evidence.kept["losses"] = min(found, key=lambda bad: bad.steps[0], default=None)
    return cast("BadLoss | None", evidence.kept["losses"])


def _is_loss(name: str) -> bool:
    words = re.split(r"[^a-z]+", name.lower())
    return "loss" in words and "scale" not in words and _HELD_OUT.isdisjoint(words)


def _scan(evidence: Evidence, name: str) -> BadLoss | None:
    blocks = list(evidence.blocks(f"scalars/{name}"))
    outputs = nonfinite_history(evidence, "outputs")
    if not blocks or outputs is None:
        return None
    steps = np.concatenate([block.steps for block in blocks])
    values = np.concatenate([block.values for block in blocks])
    marked = _marked(evidence, name, steps) & np.isnan(values).all()  # a NaN before the first number may be a filler
    if np.isnan(values).all() and not marked.any():  # nobody logged it
        return None
    finite = set(outputs.steps[~outputs.flags.any(axis=1)].tolist()) - skipped_steps(evidence)
    able = np.array([int(step) in finite for step in steps], dtype=np.bool_) & ~np.isfinite(values)
    counts = able & (np.isinf(values) | marked | _is_logged(evidence, steps, values))
    if not counts.any():
        return None
    bad = tuple(int(step) for step in steps[counts])
    value = float(values[counts.argmax()])
    return BadLoss(name, bad, value, np.isnan(value) and _is_of_nothing(evidence, bad))


def _marked(evidence: Evidence, name: str, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """``[row]``: a mark says that NaN was logged."""
    blocks = evidence.blocks(f"scalars/{LOGGED_NAN}{name}")
    marked = {int(step) for block in blocks for step in block.steps[block.values > 0]}
    return np.array([int(step) in marked for step in steps], dtype=np.bool_)


def _is_of_nothing(evidence: Evidence, steps: tuple[int, ...]) -> bool:
    """Whether gradients are 0 everywhere on those of the steps that are recent: a NaN that is passed back is NaN."""
    found = [evidence.window(key) for key in ("gradients/norm", "parameter_gradients/norm")]
    rows = [series.values[np.isin(series.steps, steps)] for series in found if series is not None]
    known = [block[~np.isnan(block)] for block in rows]
    return any(block.size for block in known) and all(bool((block == 0).all()) for block in known)


def _is_logged(evidence: Evidence, steps: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """``[row]``: a NaN that stands for a value rather than for nothing logged."""
    backward, forward = _flagged(evidence, "gradients", "parameter_gradients"), _flagged(evidence, "outputs")
    missing = np.isnan(values)
    own = np.array([int(step) in backward for step in steps], dtype=np.bool_)
    after = np.array([*(int(step) in backward | forward for step in steps[1:]), False], dtype=np.bool_)
    shown = own | after | _hole(missing)
    regular = np.cumsum(missing & ~shown) == 0
    return np.asarray(missing & shown & regular)


def _hole(missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """``[row]``: nothing there, though logged just before and after and on nine rows of ten."""
    hole = np.zeros_like(missing)
    if missing.size > _BEFORE and _OFTEN * missing.sum() <= missing.size:
        hole[_BEFORE:-1] = missing[_BEFORE:-1] & ~missing[_BEFORE + 1 :] & ~missing[_BEFORE - 1 : -2]
    return hole


def _flagged(evidence: Evidence, *groups: str) -> set[int]:
    """Steps with NaN or Inf in any of the groups."""
    histories = [history for group in groups if (history := nonfinite_history(evidence, group)) is not None]
    return {int(step) for history in histories for step in history.steps[history.flags.any(axis=1)]}
