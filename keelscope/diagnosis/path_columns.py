"""The columns of the layer table that say why: norm gain, shortcut and branch gain, and gates, one value per row.

A row of the table may hold several sub-layers, norms and gates; here they are brought to one number each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.axis import row_owner
from keelscope.diagnosis.paths import paths_of

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.store.schema import Site

__all__ = ["branch_gains", "gate_values", "norm_gains", "rows_of", "shortcut_gains"]

_FIXED = frozenset({"constant", "buffer"})

Values = list[float | None]


def rows_of(sites: Iterable[Site], rows: Sequence[Site]) -> list[int]:
    """The row of each site: the stack entry it lies in, else the innermost listed module that contains it.

    Args:
        sites: modules, sub-layers or gates.
        rows: of the layer table.

    Returns:
        Row numbers, -1 where no row fits.
    """
    paths = {site.path: i for i, site in enumerate(rows)}
    entries = {(site.stack, site.position): i for i, site in enumerate(rows) if site.role == "layer"}
    return [
        entries.get((site.stack, site.position), paths.get(site.path, row_owner(site.path, paths))) for site in sites
    ]


def norm_gains(evidence: Evidence, rows: Sequence[Site]) -> Values:
    """Geometric mean of the Jacobian gains of a row's norms; of those on residual sums only, where a row has such.

    Args:
        evidence: a run at one step.
        rows: of the layer table.

    Returns:
        One value per row, None where no norm was observed.
    """
    found = evidence.latest("norms/jacobian_gain")
    if found is None:
        return [None] * len(rows)
    sites = evidence.sites("norms/jacobian_gain")
    on_sums = {info.norm_after for info in evidence.run.info.sublayers}
    homes = rows_of(sites, rows)
    summed = {home for site, home in zip(sites, homes, strict=True) if site.path in on_sums}
    kept = [home if home not in summed or s.path in on_sums else -1 for s, home in zip(sites, homes, strict=True)]
    return _gathered(found[1], kept, len(rows), _geometric_mean)


def shortcut_gains(evidence: Evidence, rows: Sequence[Site]) -> Values:
    """Decades that shortcuts alone put between the top of the stream and the stream entering the row.

    Args:
        evidence: a run at one step.
        rows: of the layer table.

    Returns:
        One value per row, negative when the shortcut loses.
    """
    return _by_row(evidence, rows, "carried", lambda values: float(values[0]))


def branch_gains(evidence: Evidence, rows: Sequence[Site]) -> Values:
    """Mean of v = ms(F) / ms(x) over the sub-layers of a row.

    Args:
        evidence: a run at one step.
        rows: of the layer table.

    Returns:
        One value per row.
    """
    return _by_row(evidence, rows, "branch_gain", lambda values: float(np.mean(values)))


def gate_values(evidence: Evidence, rows: Sequence[Site]) -> Values:
    """Mean effective weight over the gates of a row; constants and buffers are no gates.

    Args:
        evidence: a run at one step.
        rows: of the layer table.

    Returns:
        One value per row.
    """
    found = evidence.latest("gates/value")
    if found is None:
        return [None] * len(rows)
    sites = evidence.sites("gates/value")
    homes = [-1 if site.kind in _FIXED else home for site, home in zip(sites, rows_of(sites, rows), strict=True)]
    return _gathered(found[1], homes, len(rows), lambda values: float(np.mean(values)))


def _by_row(evidence: Evidence, rows: Sequence[Site], what: str, reduce: Callable[[np.ndarray], float]) -> Values:
    """A quantity of sub-layers, `carried` or a statistic, by row; the longest stream that a row holds decides."""
    out: Values = [None] * len(rows)
    paths = paths_of(evidence)
    for stream in reversed(paths.streams if paths is not None else ()):
        values = stream.shortcut.carried if what == "carried" else stream.values.get(what)
        if values is not None:
            found = _gathered(values, rows_of(stream.sites, rows), len(rows), reduce)
            out = [new if new is not None else old for new, old in zip(found, out, strict=True)]
    return out


def _gathered(values: np.ndarray, homes: Sequence[int], n: int, reduce: Callable[[np.ndarray], float]) -> Values:
    members: dict[int, list[float]] = {}
    for value, home in zip(values.tolist(), homes, strict=True):
        if home >= 0 and not np.isnan(value):
            members.setdefault(home, []).append(value)
    return [reduce(np.array(members[i])) if i in members else None for i in range(n)]


def _geometric_mean(values: np.ndarray) -> float:
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.exp(np.mean(np.log(values))))
