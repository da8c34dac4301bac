"""Rules on single units: those that are zero for a whole batch, and activations at the flat end of their function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.diagnosis.asleep import zero_sites
from keelscope.diagnosis.evidence import OUTPUT_GRADIENT
from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.diagnosis.gates import TRAINED, gates_of
from keelscope.diagnosis.units import Units, units_of
from keelscope.formatting import count

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.store.schema import Site

__all__ = ["RULES", "dead_units", "flat_activations"]

_FLAT = "saturation/saturated_fraction"


def dead_units(evidence: Evidence) -> Iterator[Finding]:
    """Units of a rectifier are zero for every sample of the batch: they pass nothing on and get no gradient.

    Formula: share of units that are exactly 0 in all samples. ERROR where all units of a rectifier are, or all that
    enters a layer is 0 while the layer before it puts out nothing above 0. WARNING where the share is > 0.75. A share
    below 1 counts only if chance cannot explain it: 64 samples or more, 10 expected firings or more of a unit that
    does fire, and a share beyond 1/2 + 2/sqrt(units), since a deep rectifier network at initialisation maps all
    samples to nearly one direction and half of its units to 0. Between that and 0.75 it is only worth knowing.

    Source: smdebug takes half of the units, AUTOTRAINER and DeepDiagnosis 0.7 of the entries, which sparse healthy
    networks exceed; 1/2 + 2/sqrt(n) is four standard deviations of a fair coin.

    Remedy: a lower learning rate, a smaller or positive initial bias, or an activation with a slope below zero.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding on layers that are dead altogether, and one on those that are in part.
    """
    units = units_of(evidence)
    if units is None:
        return
    limit = evidence.thresholds["dead_units"]
    yield from _all_dead(evidence, units)
    part = units.beyond_chance
    for hit, severity in ((part & (units.dead > limit), Severity.WARNING), (part, Severity.INFO)):
        if hit.any():
            yield _partly_dead(units, hit, severity, limit)
            return


def _all_dead(evidence: Evidence, units: Units) -> Iterator[Finding]:
    paths = units.paths(units.all_dead)
    if not paths:
        return
    quiet = zero_sites(evidence, OUTPUT_GRADIENT)
    nearest = f"; nearest the loss: {quiet[-1]}" if len(quiet) > 1 else ""
    zero = f"; the gradient is exactly 0 in {count(len(quiet), 'module')} ({name_sites(quiet)}){nearest}"
    behind = zero if quiet else ""
    yield Finding(
        "dead_units",
        Severity.ERROR,
        f"All units of {name_sites(paths)} are exactly 0 for every sample: nothing passes, and no gradient comes "
        f"back{behind}.",
        sites=paths,
        steps=(units.step, units.step),
        value=1.0,
        threshold=1.0,
        remedy="Lower the learning rate, start the bias in front at 0 or above, or use an activation with a slope "
        "below zero (LeakyReLU, GELU).",
    )


def _partly_dead(units: Units, hit: NDArray[np.bool_], severity: Severity, limit: float) -> Finding:
    paths = units.paths(hit)
    worst = float(units.dead[hit].max())
    least = int(units.samples[hit].min())
    return Finding(
        "dead_units",
        severity,
        f"Up to {100 * worst:.0f} % of the units are exactly 0 for every sample ({least:,} or more) in "
        f"{count(len(paths), 'layer')} ({name_sites(paths)}): they get no gradient.",
        sites=paths,
        steps=(units.step, units.step),
        value=worst,
        threshold=limit,
        remedy="Lower the learning rate or the weight decay on biases, or use an activation with a slope below zero.",
    )


def flat_activations(evidence: Evidence) -> Iterator[Finding]:
    """Sigmoids, tanhs and softmaxes of which most entries are flat; part of the rule `saturated`.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding. After a thousand steps it is only worth knowing: a model that is sure of its answer is so.
    """
    found = evidence.latest(_FLAT)
    if found is None:
        return
    step, shares = found
    limit = evidence.thresholds["saturated"]
    gates = [gate.path for gate in gates_of(evidence)]
    flat = [
        (site, float(share))
        for site, share in zip(evidence.sites(_FLAT), shares, strict=True)
        if share > limit and not any(_is_of(site, gate) for gate in gates)
    ]
    if not flat:
        return
    paths = tuple(site.path for site, _ in flat)
    worst = max(share for _, share in flat)
    kinds = "/".join(dict.fromkeys(site.kind for site, _ in flat))
    yield Finding(
        "saturated",
        Severity.INFO if evidence.step >= TRAINED else Severity.WARNING,
        f"{name_sites(paths)} ({kinds}) {'is' if len(paths) == 1 else 'are'} saturated in up to {100 * worst:.0f} % of "
        "the entries or rows: hardly any gradient passes there, at any depth.",
        sites=paths,
        steps=(step, step),
        value=worst,
        threshold=limit,
        remedy="Make what enters smaller (initialisation, a norm, a temperature); a softmax before a loss that has its "
        "own, such as cross_entropy, is one too many.",
    )


def _is_of(site: Site, gate: str) -> bool:
    return site.path == gate or site.path.startswith(f"{gate}.") or gate.startswith(f"{site.path}.")


RULES = (dead_units,)
