"""Rules on residual paths: an attenuated shortcut, branches absorbed by rounding, depth that does nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keelscope.diagnosis.explanation import shortcut_reason
from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.diagnosis.gates import gates_of
from keelscope.diagnosis.paths import Paths, StreamPaths, paths_of
from keelscope.formatting import count, decades, number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "idle_depth", "residual_absorbed", "shortcut_attenuated"]

_FIRST_BLOCK = 2  # sub-layers that some schemes treat differently by design
_LEAST = 4
_CLOSED = 1e-5
_MANY = 0.25  # of the sub-layers
_ALIGNED = 0.9


def shortcut_attenuated(evidence: Evidence) -> Iterator[Finding]:
    """By shortcuts alone the gradient would vanish; only the branches hold it up.

    Formula: decades that the gradient at the top of a residual stream loses when it is carried down by shortcuts alone
    (branches detached), the first two sub-layers left out, > 2. Never a headline: the whole gradient may be flat. Not
    meant is a stream that no gradient passes at all.

    Source: shortcut attenuation of Post-LN, Xiong et al. (2020), arXiv:2002.04745, and arXiv:2601.19895; the law
    1/2 log10(1 + v/alpha^2) per sub-layer. Measured on the reference schemes at 64 sub-layers and unit-gain init:
    Post-LN 6.5 decades (ResiDual's first stream as much), HybridNorm 5.6, Highway 3.5 | Mix-LN 1.4, SiameseNorm 0.2,
    Keel 0.1, the other 21 below 0.1.

    Remedy: weigh the shortcut (Keel: a = L; DeepNorm), keep a path without norms (Pre-LN), or make the branches
    smaller.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding, on the stream that loses most.
    """
    paths, limit = paths_of(evidence), evidence.thresholds["shortcut_attenuated"]
    losses = [(_lost(stream), stream) for stream in (paths.streams if paths is not None else ())]
    gradient = evidence.gradient
    dead = gradient is not None and gradient.shape.stops  # then branches hold nothing up: `zero_gradient` says why
    losses = [(lost, stream) for lost, stream in losses if lost > limit and not (dead and np.isinf(lost))]
    if not losses:
        return
    lost, stream = max(losses, key=lambda pair: pair[0])
    total = stream.attribution.stream
    whole = "" if np.isnan(total) else f" The whole gradient changes by {decades(total)} decades there."
    size = count(max(1, len(stream) - _skipped(stream)), "sub-layer")
    amount = "everything" if np.isinf(lost) else f"{number(lost)} decades"
    low = stream.shortcut.carried < -limit
    yield Finding(
        "shortcut_attenuated",
        Severity.WARNING,
        f"By shortcuts alone the gradient loses {amount} over {size}: {shortcut_reason(stream, lost)}.{whole}",
        sites=_paths_where(stream, low),
        steps=_at(evidence),
        value=lost,
        threshold=limit,
        remedy="Weigh the shortcut (Keel, DeepNorm), keep a path without norms (Pre-LN), or make the branches smaller.",
    )


def residual_absorbed(evidence: Evidence) -> Iterator[Finding]:
    """The residual addition rounds its branch away: most of what the branch computes never reaches the stream.

    Formula: share of entries of a x + F that equal a x although F is not 0, > 0.25 in more than a quarter of the
    sub-layers. Not meant: branches with rms(F) / rms(a x) below 1e-5, which are closed by design, and those behind a
    learnable weight that starts near 0 (LayerScale at 1e-6), up to step 1000.

    Source: measured here in bfloat16 with branches of RMS 0.65: 17 % at a = 64, 53 % at 256, 72 % at 512, 85 % at 1024;
    below 1 % in float32. Writing it as x + F/a does not help.

    Remedy: keep the residual stream, or at least the addition, in float32.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    limit = evidence.thresholds["residual_absorbed"]
    for stream in _streams(evidence):
        shares = stream.values.get("absorbed_fraction", np.full(len(stream), np.nan))
        v, alpha = (stream.values.get(key, np.full(len(stream), np.nan)) for key in ("branch_gain", "alpha"))
        with np.errstate(all="ignore"):
            closed = np.sqrt(v) / alpha <= _CLOSED
        high = (shares > limit) & ~closed & ~_starting(evidence, stream)
        if high.sum() <= _MANY * len(stream):
            continue
        middle = float(np.median(shares[high]))
        yield Finding(
            "residual_absorbed",
            Severity.WARNING,
            f"Rounding absorbs the branch in {high.sum()} of {count(len(stream), 'sub-layer')}: {100 * middle:.0f} % "
            "of the entries of the residual sum (median there) do not change when it is added.",
            sites=_paths_where(stream, high),
            steps=_at(evidence),
            value=middle,
            threshold=limit,
            remedy="Keep the residual stream, or at least the addition, in float32.",
        )
        return


def _starting(evidence: Evidence, stream: StreamPaths) -> NDArray[np.bool_]:
    """``[sublayer]``: behind a learnable weight that is still as small as it started."""
    closed = evidence.thresholds["gate_closed"]
    small = {gate.path for gate in gates_of(evidence) if gate.is_starting(evidence.step, closed)}
    return np.array([not small.isdisjoint(info.gates) for info in stream.infos], dtype=np.bool_)


def idle_depth(evidence: Evidence) -> Iterator[Finding]:
    """Sub-layers that only rescale the stream a little: they could be left out.

    Formula: rms(F) / rms(a x) < 0.01 and abs(cos(F, x)) > 0.9 in more than a quarter of the sub-layers, 4 at least.
    Small alone is not idle: Keel and LayerScale start with small branches, which point elsewhere than the stream.

    Source: effective depth, arXiv:2505.13898, and the curse of depth, arXiv:2502.05795. Random branches of width d have
    a cosine of 1/sqrt(d): the margin is wide.

    Remedy: fewer layers, or branches that keep their size over depth (LayerNorm scaling, Keel, Peri-LN).

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    limit = evidence.thresholds["idle_depth"]
    for stream in _streams(evidence):
        v, cosine, alpha = (stream.values.get(key, np.full(len(stream), np.nan)) for key in _BRANCH)
        weight = np.where(np.isnan(alpha), 1.0, alpha)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.sqrt(v) / weight
        idle = (share < limit) & (np.abs(cosine) > _ALIGNED)
        if idle.sum() < _LEAST or idle.sum() <= _MANY * len(stream):
            continue
        middle = float(np.median(share[idle]))
        yield Finding(
            "idle_depth",
            Severity.WARNING,
            f"{idle.sum()} of {count(len(stream), 'sub-layer')} ({name_sites(_paths_where(stream, idle))}) only "
            f"rescale the stream: their branch is {100 * middle:.2g} % of it (median) and points along it.",
            sites=_paths_where(stream, idle),
            steps=_at(evidence),
            value=middle,
            threshold=limit,
            remedy="Use fewer layers, or a scheme whose branches keep their size over depth.",
        )
        return


_BRANCH = ("branch_gain", "cosine", "alpha")


def _streams(evidence: Evidence) -> Sequence[StreamPaths]:
    paths: Paths | None = paths_of(evidence)
    return () if paths is None else paths.streams


def _skipped(stream: StreamPaths) -> int:
    return _FIRST_BLOCK if len(stream) >= 2 * _LEAST else 0


def _lost(stream: StreamPaths) -> float:
    """Decades lost down to the sub-layer above the first block; that of a cut first block is no loss."""
    carried = stream.shortcut.carried[_skipped(stream) :]
    known = carried[~np.isnan(carried)]
    return float(-known[0]) if known.size else float("nan")


def _paths_where(stream: StreamPaths, mask: NDArray[np.bool_]) -> tuple[str, ...]:
    return tuple(stream.sites[i].path for i in np.flatnonzero(mask))


def _at(evidence: Evidence) -> tuple[int, int] | None:
    paths = paths_of(evidence)
    return None if paths is None else (paths.step, paths.step)


RULES = (shortcut_attenuated, residual_absorbed, idle_depth)
