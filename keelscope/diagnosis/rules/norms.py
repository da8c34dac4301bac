"""Rules on normalisation layers and on tokens that become alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.diagnosis.headline import is_level
from keelscope.diagnosis.paths import PLAIN_DEPTH, paths_of
from keelscope.formatting import count, number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "norm_kills_gradient", "rank_collapse"]

_EPSILON = 0.5  # share of epsilon in the scale above which the input itself is next to nothing
_PEERS = 4
_FIRST_BLOCK = 2
_DISTINCT = 0.9
_COSINE = "tokens/cosine_similarity"
_INDEX = re.compile(r"\b\d+\b")


def norm_kills_gradient(evidence: Evidence) -> Iterator[Finding]:
    """A norm lets next to no gradient through, beyond what the size of its input explains.

    Formula: (1) median Jacobian gain of a token times RMS of the input over RMS of gamma < 0.01 (the median, since a
    few tokens whose features are alike have a gain of up to 1/sqrt(epsilon)); the value of a norm over many features is
    1, whatever the scale; norms in which epsilon is more than half of the scale are left out. (2) Jacobian gain <
    0.01 of the median of the norms of the same name in the stack: its input explodes. (3) A norm on a residual sum
    takes more than a decade from the shortcut, 1/2 log10(1 + v/alpha^2) > 1: the branch swamps the stream; first block
    left out.

    Source: LayerNorm over 2 features and BatchNorm over a batch of 2 remove all directions but one of size epsilon:
    4.9e-4 is measured on the former, 0.58 is the exact value for 3 features, 0.996 for 256.

    Remedy: normalise over more features or a larger batch; bound what enters the norm.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding for each of the three.
    """
    gain, limit = _norms(evidence, "jacobian_gain"), evidence.thresholds["norm_kills_gradient"]
    if gain.size:
        size, gamma = _norms(evidence, "input_rms"), _norms(evidence, "gamma_rms")
        with np.errstate(divide="ignore", invalid="ignore"):
            passed = _typical_gain(evidence, gain) * size / gamma
        few = (passed < limit) & ~(_norms(evidence, "epsilon_share") > _EPSILON)
        yield from _norm_finding(evidence, few, passed, _FEW)
        against = gain / _peer_medians(evidence, gain)
        yield from _norm_finding(evidence, (against < limit) & ~few, against, _EXPLODING)
    yield from _swamped(evidence)


def rank_collapse(evidence: Evidence) -> Iterator[Finding]:
    """The tokens of a sequence become alike over depth: the output hardly depends on which token it is.

    Formula: mean cosine similarity of different tokens > 0.99 at the last layer of the stack and < 0.9 at the first
    observed one.

    Source: Dong et al. (2021), arXiv:2103.03404; Noci et al. (2022), arXiv:2206.03126. A Post-LN encoder of 24 blocks
    reaches 0.9999, healthy stacks of 64 sub-layers stay at 0.7 and below, Keel at its own initialisation at 0.95.

    Remedy: a stronger shortcut (Keel, DeepNorm, Pre-LN), smaller attention branches, or fewer layers.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    levels = evidence.on_axis(_COSINE, _latest(evidence, _COSINE))
    known, limit = np.flatnonzero(np.isfinite(levels)), evidence.thresholds["rank_collapse"]
    if known.size < 2 or not levels[known[-1]] > limit or not levels[known[0]] < _DISTINCT:
        return
    first, last = float(levels[known[0]]), float(levels[known[-1]])
    start = int(known[np.argmax(levels[known] > limit)])
    path = evidence.axis.sites[start].path
    yield Finding(
        "rank_collapse",
        Severity.WARNING,
        f"Tokens become alike: their mean cosine similarity rises from {first:.2f} to {last:.4f} at the top, above "
        f"{limit:g} from {path} on.",
        sites=(path, evidence.axis.sites[int(known[-1])].path),
        steps=_recent(evidence),
        value=last,
        threshold=limit,
        remedy="Strengthen the shortcut (Keel, DeepNorm, Pre-LN), shrink the attention branches, or use fewer layers.",
    )


_FEW = (
    Severity.ERROR,
    "{n} ({names}) {lets} only {value} of a gradient through, whatever its scale: it normalises too few features.",
    "Normalise over more features (a group, or a larger batch), or take the norm out.",
)
_EXPLODING = (
    Severity.WARNING,
    "{n} ({names}) {lets} {value} of the gradient through that its peers do: its input is that much larger.",
    "Find what makes the input of this norm so large; bound or scale it.",
)


def _norm_finding(
    evidence: Evidence, where: NDArray[np.bool_], values: NDArray[np.float64], words: tuple[Severity, str, str]
) -> Iterator[Finding]:
    if not where.any():
        return
    severity, statement, remedy = words
    limit = evidence.thresholds["norm_kills_gradient"]
    paths = tuple(site.path for site, hit in zip(evidence.sites(_GAIN), where, strict=True) if hit)
    value = float(values[where].min())
    number_of = {"n": count(len(paths), "norm"), "lets": "lets" if len(paths) == 1 else "let", "value": number(value)}
    text = statement.format(names=name_sites(paths), **number_of)
    yield Finding("norm_kills_gradient", severity, text, paths, _recent(evidence), value, limit, remedy)


def _swamped(evidence: Evidence) -> Iterator[Finding]:
    paths, limit = paths_of(evidence), evidence.thresholds["norm_swamped"]
    for stream in paths.streams if paths is not None else ():
        taken = stream.values.get("predicted_slope", np.full(len(stream), np.nan))
        hit = stream.is_normalised & (taken > limit) & (np.arange(len(stream)) >= _FIRST_BLOCK)
        if not hit.any():
            continue
        sites = tuple(stream.sites[i].path for i in np.flatnonzero(hit))
        worst = float(taken[hit].max())
        yield Finding(
            "norm_kills_gradient",
            Severity.INFO if len(stream) <= PLAIN_DEPTH and is_level(evidence) else Severity.WARNING,
            f"In {count(len(sites), 'sub-layer')} ({name_sites(sites)}) the branch swamps the stream: the norm on the "
            f"sum takes up to {number(worst)} decades from the shortcut.",
            sites=sites,
            steps=_recent(evidence),
            value=worst,
            threshold=limit,
            remedy="Weigh the shortcut, or make the branch smaller where it enters.",
        )
        return


_GAIN = "norms/jacobian_gain"
_QUANTILES = "norms/jacobian_gain_quantile"


def _norms(evidence: Evidence, name: str) -> NDArray[np.float64]:
    """Last recorded values ``[norm]``; NaN where a statistic is missing, empty without norms."""
    found = _latest(evidence, f"norms/{name}")
    return np.full(len(evidence.sites(_GAIN)), np.nan) if found is None else found


def _typical_gain(evidence: Evidence, gain: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[norm]``: median gain over tokens where it is recorded, else the root mean square."""
    quantiles = _latest(evidence, _QUANTILES)
    if quantiles is None:
        return gain
    median = quantiles[:, quantiles.shape[1] // 2]
    return np.where(np.isnan(median), gain, median)


def _latest(evidence: Evidence, key: str) -> NDArray[np.float64] | None:
    found = evidence.latest(key)
    return None if found is None else found[1]


def _peer_medians(evidence: Evidence, gain: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[norm]``: median gain of the norms of the same name in the same stack; NaN for less than four."""
    names = [(site.stack, _INDEX.sub("#", site.path, count=1)) for site in evidence.sites(_GAIN)]
    out = np.full(gain.shape, np.nan)
    for name in dict.fromkeys(names):
        members = [i for i, other in enumerate(names) if other == name and gain[i] > 0]
        if name[0] and len(members) >= _PEERS:
            out[members] = np.median(gain[members])
    return out


def _recent(evidence: Evidence) -> tuple[int, int] | None:
    return (int(evidence.steps[0]), int(evidence.steps[-1])) if evidence.steps.size else None


RULES = (norm_kills_gradient, rank_collapse)
