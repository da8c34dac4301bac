"""The gates and residual weights of a run, each with the weight it leaves to the branch behind it.

Read from the group ``gates`` and the structure; used by the rules on gates and by `keelscope.diagnosis.asleep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from keelscope.store.schema import SublayerInfo

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["TOKEN_GATE", "TRAINED", "Gate", "gates_of"]

TOKEN_GATE = "gate (token)"
"""Kind of a gate that is computed from its input."""
TRAINED = 1000
"""Optimizer steps after which a learnable weight is expected to have left its initial value."""
_MOST = 0.5
_STATISTICS = ("value", "minimum", "maximum", "saturated_fraction", "gradient")


@dataclass(frozen=True, slots=True)
class Gate:
    """One gate or residual weight, medians over the recent steps."""

    path: str
    kind: str
    values: Mapping[str, float]
    """Statistic -> value; NaN where not known."""
    branch_weight: float
    """Largest weight that it leaves to the branch, in size; NaN where it does not weigh a branch."""
    shortcut_weight: float
    """Weight on the shortcut beside it; NaN where not known."""
    sublayers: tuple[int, ...]
    """Indices of the sub-layers that it weighs."""
    infos: tuple[SublayerInfo, ...]
    """What the structure says of them."""

    @property
    def is_learned(self) -> bool:
        """Whether training can move it."""
        return self.kind == TOKEN_GATE or self.kind.startswith("learnable")

    def is_starting(self, step: int, closed: float) -> bool:
        """Whether it is a learnable weight, no flat sigmoid, that may be below `closed` as it started: LayerScale."""
        starts_low = self.is_learned and self.kind != TOKEN_GATE and not self.is_convex
        is_flat = self.values["saturated_fraction"] > _MOST
        return starts_low and step < TRAINED and self.branch_weight < closed and not is_flat

    @property
    def is_convex(self) -> bool:
        """Whether it shares the stream out, T to one side and 1 - T to the other: a choice, and no small start."""
        return abs(self.shortcut_weight + self.branch_weight - 1.0) <= 0.1 * self.branch_weight

    @property
    def gradient(self) -> float:
        """Norm of the gradient at the gate; NaN where it has none to receive."""
        return self.values["gradient"]


def gates_of(evidence: Evidence) -> tuple[Gate, ...]:
    """The gates of a run.

    Args:
        evidence: a run at one step.

    Returns:
        In the order of the file; empty if the group ``gates`` is not recorded.
    """
    if "gates" not in evidence.kept:
        evidence.kept["gates"] = _read(evidence)
    return cast("tuple[Gate, ...]", evidence.kept["gates"])


def _read(evidence: Evidence) -> tuple[Gate, ...]:
    sites = evidence.sites("gates/value")
    columns = {name: _column(evidence, f"gates/{name}", len(sites)) for name in _STATISTICS}
    infos, alphas = evidence.run.info.sublayers, _alphas(evidence)
    found = []
    for i, site in enumerate(sites):
        values = {name: float(column[i]) for name, column in columns.items()}
        owners = tuple(index for index, info in enumerate(infos) if site.path in info.gates)
        weights = [_branch_weight(site.kind, values, infos[k], alphas[k]) for k in owners]
        if not owners and site.kind == TOKEN_GATE:
            weights = [abs(values["value"])]
        known = [weight for weight in weights if not np.isnan(weight)]
        shortcut = [alphas[k] for k in owners if not np.isnan(alphas[k])]
        of = tuple(infos[k] for k in owners)
        branch = max(known, default=float("nan"))
        found.append(Gate(site.path, site.kind, values, branch, max(shortcut, default=float("nan")), owners, of))
    return tuple(found)


def _column(evidence: Evidence, key: str, n: int) -> np.ndarray:
    """Recent medians, or the last row where the group was not recorded lately."""
    medians = evidence.recent(key)
    if medians is not None and not np.isnan(medians).all():
        return medians
    last = evidence.latest(key)
    return np.full(n, np.nan) if last is None else last[1]


def _alphas(evidence: Evidence) -> list[float]:
    """Shortcut weight of every sub-layer: as measured last, else as the structure says."""
    infos = evidence.run.info.sublayers
    found = evidence.latest("sublayers/alpha")
    measured = found[1] if found is not None and len(found[1]) == len(infos) else np.full(len(infos), np.nan)
    said = [np.nan if info.alpha is None else info.alpha for info in infos]
    return [float(said[i] if np.isnan(value) else value) for i, value in enumerate(measured)]


def _branch_weight(kind: str, values: Mapping[str, float], info: SublayerInfo, alpha: float) -> float:
    """Size of the weight on the branch: the gate itself, or 1 - gate where it is the gate on the shortcut."""
    if "b F" not in info.form:
        return float("nan")
    low, high = values["minimum"], values["maximum"]
    ends = [values["value"]] if kind == TOKEN_GATE or np.isnan(low + high) else [low, high]
    value = values["value"]
    on_shortcut = "a x" in info.form and not np.isnan(alpha) and abs(value - alpha) < abs(1.0 - value - alpha)
    if not on_shortcut:
        return max(abs(end) for end in ends)
    return max(abs(1.0 - end) for end in ends) if len(info.gates) == 1 else float("nan")
