"""Findings on values beyond an absolute limit, as the rule set ``classic`` makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.formatting import count, number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from keelscope.diagnosis.evidence import Evidence

__all__ = ["limit_finding", "sized"]

_ADVICE = "An absolute limit: compare with the verdict over depth before changing anything."


def sized(evidence: Evidence, rule: str, key: str, side: str, limit: float, *, skip: int = 0) -> Iterator[Finding]:
    """A finding on the sites whose recent median of a series lies beyond a limit.

    Args:
        evidence: a run at one step.
        rule: name of the rule.
        key: ``group/statistic``.
        side: ``"below"`` the limit, or ``"above"`` or at it.
        limit: the limit.
        skip: sites at the input end that do not count.

    Yields:
        At most one finding, sites in execution order.
    """
    values = evidence.recent(key)
    if values is None:
        return
    hit: NDArray[np.bool_] = values < limit if side == "below" else values >= limit
    hit[:skip] = False
    if not hit.any():
        return
    paths = tuple(site.path for site, h in zip(evidence.sites(key), hit, strict=True) if h)
    worst = float(values[hit].min() if side == "below" else values[hit].max())
    text = f"{key} is {side} {number(limit)} in {count(len(paths), 'place')} ({name_sites(paths)}): {number(worst)}."
    yield limit_finding(evidence, rule, text, paths, worst, limit)


def limit_finding(
    evidence: Evidence, rule: str, statement: str, sites: tuple[str, ...], value: float, threshold: float
) -> Finding:
    """A warning, on the recent steps.

    Args:
        evidence: a run at one step.
        rule: name of the rule.
        statement: one sentence.
        sites: paths concerned.
        value: the measured number.
        threshold: its limit.

    Returns:
        The finding.
    """
    steps = (int(evidence.steps[0]), int(evidence.steps[-1])) if evidence.steps.size else None
    return Finding(rule, Severity.WARNING, statement, sites, steps, value, threshold, _ADVICE)
