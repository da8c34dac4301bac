"""Rules on single parameters: one that owns the norm, sizes of updates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.evidence import PARAMETER_GRADIENT
from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.formatting import number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "dominated_by_one_parameter", "update_ratio"]

_FEW = 4
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


RULES = (update_ratio, dominated_by_one_parameter)
