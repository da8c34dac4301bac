"""Several depth profiles on one axis: by layer when the chains are alike, by relative depth otherwise.

Used by `keelscope.diagnosis.compare` for the side-by-side report; the profiles come from `keelscope.analysis.profile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keelscope.analysis.profile import DepthProfile
from keelscope.errors import UsageError

__all__ = ["MAX_PROFILES", "CommonDepth", "common_depth"]

MAX_PROFILES = 8


@dataclass(frozen=True, slots=True, eq=False)
class CommonDepth:
    """Levels of several profiles in the same depth bins."""

    axis: Literal["depth", "relative depth"]
    """``"depth"`` when all chains have the same layers, else ``"relative depth"`` (0 input, 1 output)."""
    edges: NDArray[np.float64]
    """``[bin + 1]``, increasing, in units of depth or as a share of it."""
    levels: NDArray[np.float64]
    """``[profile, bin]``: median level of the layers in a bin, in decades; NaN where a bin holds none."""


def common_depth(profiles: Sequence[DepthProfile], bins: int = 16) -> CommonDepth:
    """Put 2 to 8 profiles on one depth axis.

    A layer belongs to the bin that holds the middle of the stretch it covers. Where the chains differ in depth, a
    chain with fewer layers than bins lends a bin without a layer its nearest layer, so that no run looks interrupted.

    Args:
        profiles: what to compare.
        bins: largest number of rows.

    Returns:
        The common axis and the median levels.

    Raises:
        UsageError: for fewer than 2 or more than 8 profiles.
    """
    if not 2 <= len(profiles) <= MAX_PROFILES:
        raise UsageError(f"{len(profiles)} profiles were given; a comparison takes 2 to {MAX_PROFILES}.")
    alike = all(p.length == profiles[0].length and np.array_equal(p.depth, profiles[0].depth) for p in profiles)
    count = max(1, min(bins, max(p.levels.size for p in profiles)))
    edges = _layer_edges(profiles[0], count) if alike else np.linspace(0.0, 1.0, count + 1)
    levels = np.stack([_binned(p, edges if alike else edges * p.length, nearest=not alike) for p in profiles])
    return CommonDepth("depth" if alike else "relative depth", edges, levels)


def _layer_edges(profile: DepthProfile, count: int) -> NDArray[np.float64]:
    """Edges that fall between layers, so that every bin holds about the same number of them."""
    ends = np.concatenate([[0.0], profile.depth])
    picks = np.linspace(0, profile.depth.size, count + 1).round().astype(int)
    return np.asarray(ends[picks])


def _binned(profile: DepthProfile, edges: NDArray[np.float64], *, nearest: bool) -> NDArray[np.float64]:
    middles = profile.depth - np.diff(profile.depth, prepend=0.0) / 2
    home = np.clip(np.searchsorted(edges, middles, side="right") - 1, 0, edges.size - 2)
    out = np.full(edges.size - 1, np.nan)
    for b in range(out.size):
        members = np.flatnonzero(home == b)
        if members.size == 0 and nearest and middles.size:
            members = np.array([np.abs(middles - (edges[b] + edges[b + 1]) / 2).argmin()])
        usable = profile.levels[members]
        usable = usable[np.isfinite(usable)]
        out[b] = np.median(usable) if usable.size else np.nan
    return out
