"""Where and when NaN or Inf appeared: per step and site, and the module that produced it first.

Used by the headline and by the two non-finite rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.store.series import Series

__all__ = ["NonfiniteHistory", "innermost", "nonfinite_history", "skipped_steps"]


@dataclass(frozen=True, slots=True, eq=False)
class NonfiniteHistory:
    """Which sites held NaN or Inf on which recorded step."""

    flags: NDArray[np.bool_]
    """``[step, site]``."""
    steps: NDArray[np.int64]
    """``[step]``."""
    paths: tuple[str, ...]
    """``[site]``, in execution order."""


def nonfinite_history(evidence: Evidence, group: str) -> NonfiniteHistory | None:
    """Non-finite flags of one group, up to the reported step.

    From the count of non-finite entries where it is recorded, else from norms that were observed and are not finite
    (squares are summed in float64 and do not overflow by themselves).

    Args:
        evidence: a run at one step.
        group: ``"outputs"``, ``"gradients"`` or ``"parameter_gradients"``.

    Returns:
        The flags; None if the run does not hold the group.
    """
    name = f"nonfinite {group}"
    if name not in evidence.kept:
        evidence.kept[name] = _scan(evidence, group)
    return cast("NonfiniteHistory | None", evidence.kept[name])


def _scan(evidence: Evidence, group: str) -> NonfiniteHistory | None:
    """All rows up to the reported step, block by block."""
    counted = f"{group}/nonfinite_count" in evidence.run
    key = f"{group}/nonfinite_count" if counted else f"{group}/norm"
    flags: list[NDArray[np.bool_]] = []
    steps: list[NDArray[np.int64]] = []
    start = 0
    for block in evidence.blocks(key):
        flags.append(block.values > 0 if counted else _broken(evidence, key, block, start))
        steps.append(block.steps)
        start += len(block)
    if not steps:
        return None
    paths = tuple(site.path for site in evidence.sites(key))
    return NonfiniteHistory(np.concatenate(flags), np.concatenate(steps), paths)


def _broken(evidence: Evidence, key: str, block: Series, start: int) -> NDArray[np.bool_]:
    observed = evidence.run.observed(key, start, start + len(block))
    return np.asarray(observed & ~np.isfinite(block.values))


def skipped_steps(evidence: Evidence) -> set[int]:
    """Steps that the optimizer skipped: a loss scaler saw an overflow and lowers its scale, as it should."""
    return {
        int(step)
        for block in evidence.blocks("scalars/skipped")
        for step, value in zip(block.steps, block.values, strict=True)
        if value > 0
    }


def innermost(paths: Sequence[str], flagged: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Flagged sites that contain no other flagged site: the modules themselves rather than what they lie in.

    Args:
        paths: ``[site]``.
        flagged: ``[site]``.

    Returns:
        Indices in axis order.

    Example:
        >>> innermost(["", "mid", "mid.log", "aux"], np.array([True, True, True, True])).tolist()
        [2, 3]
    """
    chosen = np.flatnonzero(flagged).tolist()
    containers = {""}
    for index in chosen:
        parts = paths[index].split(".")
        containers.update(".".join(parts[:end]) for end in range(1, len(parts)))
    inner = [index for index in chosen if paths[index] not in containers]
    return np.array(inner or chosen, dtype=np.int64)
