"""Which layers hold units that are zero for every sample, read from the group ``activations``.

Used by the rule on dead units, and by the one on zero gradients, which a dead layer explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.store.schema import Site

__all__ = ["Units", "is_cut_by_units", "units_of"]

_SAMPLES = 64
_FIRINGS = 10.0
_ROUNDING = 1e-3
_MEAN = "outputs/mean"
_NAMES = ("dead_fraction", "active_fraction", "samples", "units")


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Shares of dead units at the last row that holds them, ``[site]`` each."""

    step: int
    names: tuple[str, ...]
    """The rectifier, or the layer before it where the model has no module for it."""
    dead: NDArray[np.float64]
    samples: NDArray[np.float64]
    all_dead: NDArray[np.bool_]
    beyond_chance: NDArray[np.bool_]
    """Whether the share of dead units is larger than like samples and few of them would make it."""

    def paths(self, where: NDArray[np.bool_]) -> tuple[str, ...]:
        """Names of the sites in a mask, each once."""
        return tuple(dict.fromkeys(name for name, hit in zip(self.names, where, strict=True) if hit))


def units_of(evidence: Evidence) -> Units | None:
    """The dead units of a run.

    Args:
        evidence: a run at one step.

    Returns:
        Shares and what they mean; None if the group ``activations`` is not recorded.
    """
    if "units" not in evidence.kept:
        evidence.kept["units"] = _read(evidence)
    return cast("Units | None", evidence.kept["units"])


def is_cut_by_units(evidence: Evidence) -> bool:
    """Whether a rectifier puts out nothing but 0, so that no gradient comes back through it."""
    units = units_of(evidence)
    return units is not None and bool(units.all_dead.any())


def _read(evidence: Evidence) -> Units | None:
    found = {name: evidence.latest(f"activations/{name}") for name in _NAMES}
    if any(value is None for value in found.values()):
        return None
    dead, active, samples, units = (value[1] for value in found.values() if value is not None)
    step = next(value[0] for value in found.values() if value is not None)
    sites = evidence.sites("activations/dead_fraction")
    rectifier = np.array([site.numel == 0 for site in sites], dtype=np.bool_)
    before = [_before(evidence, site) for site in sites]
    with np.errstate(divide="ignore", invalid="ignore"):
        firings = active * samples / (1.0 - dead)
        chance = 0.5 + 2.0 / np.sqrt(units)
    below = np.array([_is_below_zero(evidence, place) for place in before], dtype=np.bool_)
    all_dead = (dead == 1) & (samples > 1) & (rectifier | below)
    beyond = (dead > chance) & (dead < 1) & (samples >= _SAMPLES) & (firings >= _FIRINGS)
    said = ~rectifier & np.concatenate([[False], rectifier[:-1]])  # of the rectifier just before it
    outputs = evidence.sites(_MEAN)
    names = [s.path if r or p < 0 else outputs[p].path for s, r, p in zip(sites, rectifier, before, strict=True)]
    return Units(step, tuple(names), dead, samples, all_dead & ~said, beyond & ~said)


def _before(evidence: Evidence, site: Site) -> int:
    """The last watched layer with parameters that ran before a site; -1 if there is none."""
    outputs = evidence.sites(_MEAN)
    place = next((i for i, other in enumerate(outputs) if other.path == site.path), 0)
    return next((i for i in range(place - 1, -1, -1) if outputs[i].numel > 0), -1)


def _is_below_zero(evidence: Evidence, place: int) -> bool:
    """Whether all entries of an output can be at or below 0: var <= (0 - mean)(mean - low), Bhatia and Davis (2000)."""
    found = [evidence.latest(f"outputs/{name}") for name in ("mean", "variance", "max_abs")]
    if place < 0 or any(value is None for value in found):
        return False
    mean, variance, size = (float(value[1][place]) for value in found if value is not None)
    return size > 0 and mean < 0 and variance <= -mean * (mean + size) * (1 + _ROUNDING)
