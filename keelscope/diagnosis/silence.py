"""Where the gradient stops on its way to the input: trainable layers that get none, or one that is exactly 0.

Used by the headline and by the rules on zero gradients. Frozen layers, and layers that nothing trainable lies below of,
have no gradient by intent and are no silence: the coverage table tells them from disconnected ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from keelscope.diagnosis.axis import row_owner
from keelscope.diagnosis.evidence import PARAMETER_GRADIENT

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["Silence", "disconnected_parameters", "silence"]

_SHARE = 0.25  # of the layers of the main stack


@dataclass(frozen=True, slots=True)
class Silence:
    """Layers at the input side that no gradient reaches."""

    missing: int
    """Layers without any gradient although they are trainable."""
    zeros: int
    """Layers whose gradient is exactly 0."""
    layers: int
    """All layers of the chain."""
    boundary: str
    """Path of the silent layer nearest the loss."""


def disconnected_parameters(evidence: Evidence) -> list[str]:
    """Trainable parameters of modules that ran, without a gradient on the recent steps.

    Args:
        evidence: a run at one step.

    Returns:
        Their paths, in the order of the coverage table.
    """
    medians = evidence.recent(PARAMETER_GRADIENT)
    sites = evidence.sites(PARAMETER_GRADIENT)
    seen = set() if medians is None else {s.path for s, v in zip(sites, medians, strict=True) if not np.isnan(v)}
    entries = (entry for entry in evidence.coverage if entry.what == "parameter" and entry.status == "disconnected")
    return [entry.path for entry in entries if entry.path not in seen]


def silence(evidence: Evidence) -> Silence | None:
    """The silent part at the input side, if it is at least a quarter of the layers and the rest gets a gradient.

    Args:
        evidence: a run at one step.

    Returns:
        Its size and boundary; None if there is none.
    """
    if "silence" not in evidence.kept:
        evidence.kept["silence"] = _found(evidence)
    return cast("Silence | None", evidence.kept["silence"])


def _found(evidence: Evidence) -> Silence | None:
    sites = evidence.axis.sites
    alive, zero = _alive_and_zero(evidence)
    missing = _missing(evidence) & ~alive & ~zero
    end = int(alive.argmax()) if alive.any() else len(sites)
    quiet = np.flatnonzero((missing | zero)[:end])
    if not quiet.size or quiet.size < _SHARE * len(sites) or not (alive.any() or _parameters_alive(evidence)):
        return None
    return Silence(int(missing[:end].sum()), int(zero[:end].sum()), len(sites), sites[int(quiet[-1])].path)


def _alive_and_zero(evidence: Evidence) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Layers with a gradient, NaN and underflow included, and layers where it is exactly 0."""
    gradient = evidence.gradient
    if gradient is None:
        nothing = np.zeros(len(evidence.axis), dtype=np.bool_)
        return nothing, nothing.copy()
    return gradient.shape.is_observed & ~gradient.shape.is_zero, gradient.shape.is_zero


def _missing(evidence: Evidence) -> NDArray[np.bool_]:
    """Layers with a disconnected parameter."""
    place = {site.path: i for i, site in enumerate(evidence.axis.sites)}
    owners = {row_owner(path, place) for path in disconnected_parameters(evidence)}
    return np.array([i in owners for i in range(len(place))], dtype=np.bool_)


def _parameters_alive(evidence: Evidence) -> bool:
    medians = evidence.recent(PARAMETER_GRADIENT)
    return medians is not None and bool((medians > 0).any())
