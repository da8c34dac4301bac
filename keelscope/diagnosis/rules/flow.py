"""Rules on the shape over depth: vanishing, exploding, knee, uniformly small gradients, growing variance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from keelscope.analysis.growth import growth_law
from keelscope.diagnosis.evidence import LATE_TOKENS
from keelscope.diagnosis.finding import Finding, Severity
from keelscope.diagnosis.headline import word_for
from keelscope.formatting import count, decades, number, times

if TYPE_CHECKING:
    from keelscope.analysis.growth import Growth
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.diagnosis.profiles import NamedProfile

__all__ = ["RULES", "exploding", "knee", "uniformly_small", "vanishing", "variance_growth"]

_POWER = 1.5
_STEEP = 100.0
_MOST, _FEW = 0.5, 0.05
_NEARLY_ALL = 0.9


def vanishing(evidence: Evidence) -> Iterator[Finding]:
    """The gradient shrinks from the output to the input of a stack.

    S = Theil-Sen slope of log10 gradient over the middle 10..90 % of the layers times depth L, in decades; S > 2 in
    the output-gradient, the late-token or the parameter-gradient profile. The worst one is described, others named.
    The main stack and every other one of at least 4 entries that follow each other are judged, each for itself.

    Source: slopes instead of absolute limits, since 1e-7 or 1e-3 move with loss scale, batch and width; shortcut
    attenuation of Post-LN after Xiong et al. (2020), arXiv:2002.04745, and arXiv:2601.19895.

    Remedy: a shortcut that passes the gradient on (Pre-LN, or Post-LN with a scaled shortcut as in Keel or DeepNorm),
    activations that do not saturate, an initialisation that keeps the gain near 1.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding per stack.
    """
    for chain in evidence.chains:
        yield from _slope_finding(chain, "vanishing", 1.0)


def exploding(evidence: Evidence) -> Iterator[Finding]:
    """The gradient grows from the output to the input of a stack.

    As `vanishing`, with S < -2 decades.

    Source: same scale as `vanishing`; growth without normalisation after Zhang et al. (2019), arXiv:1901.09321.

    Remedy: normalise the stream or scale the branches by 1/sqrt(L); gradient clipping hides it but does not cure it.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding per stack.
    """
    for chain in evidence.chains:
        yield from _slope_finding(chain, "exploding", -1.0)


def _slope_finding(evidence: Evidence, rule: str, sign: float) -> Iterator[Finding]:
    """The finding on the profile with the largest S of that sign, if any is beyond the limit."""
    beyond = [p for p in evidence.judged if word_for(p.shape, evidence.thresholds) == rule]
    if not beyond:
        return
    worst = max(beyond, key=lambda profile: sign * profile.shape.total)
    shape = worst.shape
    limit = evidence.thresholds[rule]
    sites = _far_from_output(evidence, worst, limit)
    others = ", ".join(f"{p.title} {decades(p.shape.total)}" for p in beyond if p is not worst)
    also = f" (also {others})" if others else ""
    yield Finding(
        rule,
        Severity.ERROR,
        f"The {worst.title} {'shrinks' if sign > 0 else 'grows'} by a fitted {times(-shape.total)} over "
        f"{_part(evidence, worst)}{_of_which(evidence)}: S = {decades(shape.total)} decades, limit "
        f"{decades(sign * limit)}{also}{_hidden(evidence, worst, limit)}.{_where(sites, limit)}",
        sites=sites,
        steps=_recent(evidence),
        value=shape.total,
        threshold=sign * limit,
        remedy=_REMEDIES[rule],
    )


def _part(evidence: Evidence, profile: NamedProfile) -> str:
    """The depth that the figures are about."""
    shape = profile.shape
    text = count(shape.covered, evidence.axis.unit)
    return f"{text} of {shape.length:g}, the part that gets a gradient" if shape.is_partial else text


def _of_which(chain: Evidence) -> str:
    """The stack, where the run holds several."""
    stacks = chain.run.info.stacks
    return f" of {chain.axis.stack.path}" if chain.axis.stack is not None and len(stacks) > 1 else ""


def _hidden(evidence: Evidence, worst: NamedProfile, limit: float) -> str:
    """Said when only the late tokens show it: the usual whole-tensor norm looks healthy."""
    whole = evidence.gradient
    if worst.key != LATE_TOKENS or whole is None or abs(whole.shape.total) > limit:
        return ""
    return f"; the {whole.title} hides it ({decades(whole.shape.total)}), since a few early tokens dominate"


def _where(sites: tuple[str, ...], limit: float) -> str:
    if not sites:
        return ""
    span = sites[0] if len(sites) == 1 else f"{sites[0]} to {sites[-1]}"
    verb = "differs" if len(sites) == 1 else "differ"
    return f" {count(len(sites), 'layer')} ({span}) {verb} from the output end by more than {limit:g} decades."


_REMEDIES = {
    "vanishing": "Give the gradient a shortcut that keeps its size: Pre-LN, or Post-LN with a scaled shortcut "
    "(Keel, DeepNorm); check for saturating activations and too small weights.",
    "exploding": "Normalise the stream, or scale the branches by 1/sqrt(L); lower the initial weight scale.",
}


def _far_from_output(evidence: Evidence, profile: NamedProfile, limit: float) -> tuple[str, ...]:
    """Layers whose level is more than the limit away from the topmost usable one."""
    levels = profile.shape.levels
    usable = np.flatnonzero(np.isfinite(levels))
    far = profile.shape.is_floored.copy()
    if usable.size:
        far |= np.abs(levels - levels[usable[-1]]) > limit
    return tuple(evidence.axis.sites[i].path for i in np.flatnonzero(far))


def knee(evidence: Evidence) -> Iterator[Finding]:
    """One step between neighbouring layers of one role changes the gradient by more than a decade.

    Formula: largest change of log10 output gradient between neighbours, which must exceed 1 decade both as it is and
    after the fitted slope is taken off. The first block is left out, since several schemes treat it differently by
    design, and so is the embedding. Where depth counts modules of every kind, which may lie side by side, only a change
    that lasts beyond the two counts.

    Source: `analysis.profile.Knee`; a slope over the whole stack cannot show a single bad layer.

    Remedy: look at what is special in that layer (a norm over few features, a closed gate, a saturated activation).

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    gradient = evidence.gradient
    found = None
    if gradient is not None and gradient.key.startswith("gradients/"):
        found = gradient.shape.step if evidence.axis.stack is None else gradient.shape.knee
    limit = evidence.thresholds["knee"]
    if gradient is None or found is None or min(abs(found.change), abs(found.excess)) <= limit:
        return
    lower, upper = (evidence.axis.sites[i].path for i in (found.lower, found.upper))
    verb = "drops" if found.change > 0 else "jumps"
    yield Finding(
        "knee",
        Severity.WARNING,
        f"The {gradient.title} {verb} {times(-found.change)} in one step, from {upper} to {lower}.",
        sites=(lower, upper),
        steps=_recent(evidence),
        value=found.change,
        threshold=limit if found.change > 0 else -limit,
        remedy="Look at what stands between these two layers: a norm over few features, a closed gate, a saturation.",
    )


def uniformly_small(evidence: Evidence) -> Iterator[Finding]:
    """All parameter gradients are tiny, though no depth is to blame: the loss is scaled down.

    Formula: gradient RMS per entry < 1e-8 in nine parameters of ten, while every abs(S) <= 2. Blocks behind a small
    LayerScale (1e-6) are not meant: their scales and all that stands outside have usual gradients.

    Source: 1e-8 is the default epsilon of Adam and AdamW; below it the update no longer has the size of the learning
    rate, and half precision underflows to 0 (6e-8).

    Remedy: average the loss over fewer terms, scale it, or lower epsilon.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    sizes = evidence.recent("parameter_gradients/rms")
    limit = evidence.thresholds["uniformly_small"]
    if sizes is None or any(_is_steep(evidence, p) for chain in evidence.chains for p in chain.judged):
        return
    positive = sizes[np.isfinite(sizes) & (sizes > 0)]
    if positive.size == 0 or np.quantile(positive, _NEARLY_ALL) >= limit:
        return
    middle = float(np.median(positive))
    yield Finding(
        "uniformly_small",
        Severity.WARNING,
        f"Parameter gradients are small everywhere: median RMS {number(middle)} per entry, below Adam's epsilon of "
        "1e-8; depth is not the cause.",
        steps=_recent(evidence),
        value=middle,
        threshold=limit,
        remedy="Check how the loss is averaged and scaled; otherwise lower the optimizer's epsilon.",
    )


def _is_steep(evidence: Evidence, profile: NamedProfile) -> bool:
    return word_for(profile.shape, evidence.thresholds) in ("vanishing", "exploding")


def variance_growth(evidence: Evidence) -> Iterator[Finding]:
    """The output variance grows along the main stack.

    Formula: variance at the last layer over that at the first after the first block > 10. A sum of unlike branches
    grows linearly in depth, which is what an unscaled Pre-LN does by design and only worth knowing. It is a warning
    where the scheme does not explain it: the variance follows an exponential, or a power above 1.5 (law by smallest
    BIC, `keelscope.analysis.growth`), by more than 100; it grows more than 10 L; or norms on the sums should keep it
    level.

    Source: linear growth in Pre-LN, Xiong et al. (2020), arXiv:2002.04745, Lemma 2; its cost in depth,
    arXiv:2502.05795; exponential growth during training, arXiv:2502.02732.

    Remedy: scale the branches by 1/sqrt(L), normalise their output (Peri-LN), use LayerNorm scaling, or initialise
    the branches smaller.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    if evidence.axis.stack is None:
        return
    variances = evidence.on_axis("outputs/variance")
    usable = np.flatnonzero(np.isfinite(variances) & (variances > 0))
    usable = usable[usable >= evidence.axis.first_block]
    if usable.size < 2:
        return
    first, last = int(usable[0]), int(usable[-1])
    growth = float(variances[last] / variances[first])
    limit = evidence.thresholds["variance_growth"]
    if growth <= limit:
        return
    law = growth_law(evidence.axis.depth[usable], variances[usable])
    excess, judged = _judged_growth(law, growth, evidence)
    yield Finding(
        "variance_growth",
        Severity.WARNING if excess else Severity.INFO,
        f"The output variance grows x{number(growth)} from {evidence.axis.sites[first].path} to "
        f"{evidence.axis.sites[last].path}, {judged}.",
        sites=(evidence.axis.sites[first].path, evidence.axis.sites[last].path),
        steps=_recent(evidence),
        value=growth,
        threshold=limit,
        remedy="Scale the branches by 1/sqrt(L), normalise their outputs, or initialise them smaller."
        if excess
        else "None needed, unless the deep layers learn little: scale the branches by 1/sqrt(L) then.",
    )


def _judged_growth(law: Growth, growth: float, evidence: Evidence) -> tuple[bool, str]:
    """Whether the scheme does not explain the growth, and the words for it."""
    unit = evidence.axis.unit
    if law.law == "exponential" and law.is_decided:
        return (
            growth > _STEEP,
            f"exponentially (x{number(10.0**law.rate)} per {unit}): each branch grows with its stream",
        )
    forms = [sublayer.form.startswith("n(") for sublayer in evidence.run.info.sublayers]
    level = float(np.mean(forms)) if forms else 0.0
    alike = not _FEW < level < 1.0 - _FEW  # level below and linear above, as in Mix-LN, looks like a power
    if law.law == "power" and law.is_decided and law.rate > _POWER and alike:
        return growth > _STEEP, f"as depth to the power {number(law.rate)}, faster than a sum of unlike branches"
    if growth > evidence.thresholds["variance_growth"] * evidence.axis.length:
        return True, "faster than linear"
    if level > _MOST:
        return True, "although norms on the sums should keep it level"
    return False, "about linear in depth, as in any Pre-LN stack"


def _recent(evidence: Evidence) -> tuple[int, int] | None:
    return (int(evidence.steps[0]), int(evidence.steps[-1])) if evidence.steps.size else None


RULES = (exploding, vanishing, knee, uniformly_small, variance_growth)
