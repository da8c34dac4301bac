"""Why a gradient profile is what it is, in one or two sentences: shortcut, total, and the largest cause.

Written from the main stream of `keelscope.diagnosis.paths.Paths`; shown by every format under the headline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.finding import name_sites
from keelscope.formatting import count, decades, number

if TYPE_CHECKING:
    from keelscope.diagnosis.paths import Paths, StreamPaths

__all__ = ["CAUSE_TITLES", "explanation", "shortcut_reason"]

CAUSE_TITLES = {
    "norm": "the norms on the sums",
    "scale": "the weights on the shortcut",
    "norm and scale": "the norms and the weights under them",
    "branch": "the branches",
    "branch and other": "the branches and what lies between them",
    "other": "what lies between the sub-layers",
    "embedding": "the input end below the first sub-layer",
}
"""How each cause of `keelscope.analysis.attribution` is called in a sentence."""

_LEVEL = 0.3  # decades, a factor of two, within which a path counts as level
_TELLING = 1.0  # decades from which the whole gradient is said to grow or shrink
_HALF = 0.5
_AGREES = 0.35  # share of the loss within which the law may miss it


def explanation(paths: Paths) -> str:
    """The explanation of a run.

    Args:
        paths: its residual paths.

    Returns:
        Text that ends with a full stop; empty when neither the shortcut nor the whole gradient is known.
    """
    stream = paths.main
    clauses = [clause for clause in (_shortcut(stream), _total(stream)) if clause]
    if not clauses:
        return ""
    text = _whose(paths) + "; ".join(clauses)
    parts = [f"{text[0].upper()}{text[1:]}.", _silent(stream), _largest(stream), _remarks(paths)]
    return " ".join(part for part in parts if part)


def _silent(stream: StreamPaths) -> str:
    """Said where branches pass nothing back: a level shortcut is then no sign of health."""
    parts = stream.values.get("branch_part", np.full(len(stream), np.nan))
    silent = int((parts == 0).sum())
    return f"No gradient passes the branch in {silent} of {count(len(stream), 'sub-layer')}." if silent else ""


def _whose(paths: Paths) -> str:
    """Said first where the stream that is told of is a small part of the model, or of a stack beside the main one."""
    if paths.stack:
        return f"in {paths.stack} "
    sublayers = sum(len(stream) for stream in paths.streams)
    if len(paths.main) > _HALF * sublayers:
        return ""
    return f"in the longest of {len(paths.streams)} residual streams ({len(paths.main)} of {sublayers} sub-layers) "


def _shortcut(stream: StreamPaths) -> str:
    """What the shortcut alone does over the stream, and by what."""
    lost, size = stream.shortcut.lost, count(len(stream), "sub-layer")
    if np.isnan(lost):
        return ""
    if np.isinf(lost):
        cut = int(np.isneginf(stream.shortcut.gains).sum())
        where = f"{cut} of {size}" if cut else f"part of {size}"
        return f"the shortcut path is cut: it passes exactly nothing in {where}"
    lowest = stream.shortcut.lowest
    deepest = -float(stream.shortcut.carried[lowest])
    if deepest > max(lost, 0.0) + _TELLING:
        return f"the shortcut path {_lost_and_back(stream, lowest, deepest - lost)}"
    if abs(lost) <= _LEVEL:
        return f"the shortcut path keeps the gradient ({_changed(-lost)} decades over {size})"
    verb = "loses" if lost > 0 else "gains"
    return f"the shortcut path {verb} {number(abs(lost))} decades over {size}: {shortcut_reason(stream, lost)}"


def _lost_and_back(stream: StreamPaths, lowest: int, back: float) -> str:
    """The loss down to a sub-layer below which another path joins."""
    lost, size = -float(stream.shortcut.carried[lowest]), count(len(stream) - lowest, "sub-layer")
    below = f"below {stream.sites[lowest].path} another path gives {number(back)} decades back"
    return f"loses {number(lost)} decades over {size}: {shortcut_reason(stream, lost)}; {below}"


def shortcut_reason(stream: StreamPaths, lost: float) -> str:
    """By what the shortcut of a stream loses or gains.

    Args:
        stream: the stream.
        lost: decades, to compare with what the law of post-norms predicts.

    Returns:
        A clause without a full stop.
    """
    if np.isinf(lost):
        cut = [site.path for site, gain in zip(stream.sites, stream.shortcut.gains, strict=True) if gain == -np.inf]
        return f"exactly nothing passes {name_sites(cut) or 'it'}"
    shortcut = stream.shortcut
    if stream.is_normalised.mean() < _HALF:
        by = "gates and weights" if any(info.gates for info in stream.infos) else "weights"
        return f"{by} multiply it by {number(shortcut.mean_alpha)} per sub-layer in the geometric mean"
    law = shortcut.predicted[~np.isnan(shortcut.predicted)]
    v, a = shortcut.mean_branch_gain, shortcut.mean_alpha
    if law.size and not np.isnan(v) and abs(law[0] + lost) <= _AGREES * abs(lost):
        plain = np.isnan(a) or abs(np.log10(a)) < 0.01
        divisor = "sqrt(1 + v)" if plain else "sqrt(1 + v/a^2)"
        weight = "" if plain else f", a = {number(a)}"
        return f"post-norms divide by {divisor}, v = {number(v)}{weight}"
    aligned, cosine = _aligned_law(stream)
    if abs(aligned - lost) <= _AGREES * abs(lost):
        along = f"where F points along x (cosine {number(cosine)})"
        return f"post-norms divide by the size of a x + F, v = {number(v)}, {along}"
    mean = 10.0 ** (-lost / len(stream))
    against = f", where sqrt(1 + v/a^2) explains {decades(float(law[0]))} decades" if law.size else ""
    return f"post-norms and weights multiply it by {number(mean)} in the geometric mean{against}"


def _aligned_law(stream: StreamPaths) -> tuple[float, float]:
    """Decades that post-norms take where branches are not at right angles to the stream, and the mean cosine."""
    found = [stream.values.get(key, np.full(len(stream), np.nan)) for key in ("branch_gain", "alpha", "cosine")]
    v, alpha, cosine = (column[stream.is_normalised] for column in found)
    known = np.isfinite(v) & (alpha > 0) & np.isfinite(cosine)
    v, alpha, cosine = v[known], alpha[known], cosine[known]
    # ms(a x + F) = ms(x) (a^2 + v + 2 a cos sqrt(v)), of which a^2 is the shortcut's
    ratio = 1.0 + v / alpha**2 + 2.0 * cosine * np.sqrt(v) / alpha
    return float(0.5 * np.log10(np.maximum(ratio, 1e-300)).sum()), float(cosine.mean()) if cosine.size else float("nan")


def _total(stream: StreamPaths) -> str:
    """What the whole gradient does beside it."""
    total, lost = stream.attribution.stream, stream.shortcut.lost
    if np.isnan(total):
        return ""
    told = {cause.name: cause.decades for cause in stream.attribution.causes}
    name = "branch" if "branch" in told else "branch and other"
    branches = told[name]
    by = f"{CAUSE_TITLES[name]} (which {'add' if branches > 0 else 'take'} {decades(branches).lstrip('+-')} decades)"
    does = _beside_a_lossy_shortcut(total, lost, by) if lost > _TELLING else _beside_a_shortcut(total, branches, by)
    return f"the total gradient ({_changed(total)} decades) {does}"


def _changed(change: float) -> str:
    """A change of the gradient towards the input with a verb: S has the opposite sign, so that none is shown here."""
    shown = decades(round(change, 9)).lstrip("+-")
    return shown if float(shown) == 0 else f"{'gains' if change > 0 else 'loses'} {shown}"


def _beside_a_lossy_shortcut(total: float, lost: float, by: str) -> str:
    if np.isinf(lost):
        return "passes there by the branches alone"
    if total <= -_HALF * lost:
        return f"shrinks with it, and {by} do not make up for it"
    return f"grows towards the input, by {by}" if total > _TELLING else f"is held up by {by}"


def _beside_a_shortcut(total: float, branches: float, by: str) -> str:
    if abs(total) <= _TELLING:
        return "stays level"
    cause = f", by {by}" if branches / total > _HALF else ""
    return f"{'grows' if total > 0 else 'shrinks'} towards the input{cause}"


def _largest(stream: StreamPaths) -> str:
    """The largest cause, where there is anything to explain."""
    largest = stream.attribution.largest
    if largest is None or abs(largest.decades) <= _LEVEL:
        return ""
    told = (stream.attribution.stream, stream.shortcut.lost, largest.decades)
    if not any(abs(change) > _TELLING for change in told):
        return ""  # a level gradient on an open path: nothing to explain
    change = f"{decades(largest.decades).lstrip('+-')} decades {'gained' if largest.decades > 0 else 'lost'}"
    return f"Largest cause: {CAUSE_TITLES[largest.name]} ({change})."


def _remarks(paths: Paths) -> str:
    """What the numbers leave out."""
    stream, remarks = paths.main, []
    if stream.shortcut.floored:
        floored = count(stream.shortcut.floored, "sub-layer")
        remarks.append(f"The float32 floor of 1e-37 hides the shortcut gradient of {floored}; gains continue it there.")
    unused = len(stream) - int(stream.attribution.used.sum())
    if unused and stream.attribution.used.any():
        remarks.append(f"The causes leave {count(unused, 'sub-layer')} without a usable gradient out.")
    if len(paths.streams) > 1 and not _whose(paths):
        remarks.append(f"This is the longest of {len(paths.streams)} residual streams.")
    return " ".join(remarks)
