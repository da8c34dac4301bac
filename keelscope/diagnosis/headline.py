"""The headline: one word for the gradient flow of a run, and one sentence with the numbers it rests on.

Drawn from the depth profiles of `Evidence`; the rules add what the headline does not say. Thresholds are decades over
the whole stack and therefore free of scale: multiplying every gradient by a constant changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from keelscope.analysis.profile import MIN_LAYERS
from keelscope.diagnosis.asleep import asleep, explains, zero_sites
from keelscope.diagnosis.losses import bad_loss
from keelscope.diagnosis.nonfinite import nonfinite_history, skipped_steps
from keelscope.diagnosis.silence import silence
from keelscope.diagnosis.thresholds import DEFAULTS
from keelscope.formatting import count, decades, number, times

if TYPE_CHECKING:
    from keelscope.analysis.profile import DepthProfile
    from keelscope.diagnosis.evidence import Evidence
    from keelscope.diagnosis.profiles import NamedProfile

__all__ = ["WORDS", "Headline", "Verdict", "Word", "decide", "is_level", "verdicts", "word_for", "word_of", "worst_of"]

Word = Literal["flat", "drifting", "vanishing", "exploding", "dead", "non-finite", "not enough data"]

WORDS: tuple[Word, ...] = ("non-finite", "not enough data", "dead", "exploding", "vanishing", "drifting", "flat")
"""Every headline, in order of precedence."""
_TELLING = 0.1  # decades from which a slope is worth its digits


@dataclass(frozen=True, slots=True)
class Headline:
    """The verdict in one word and one sentence."""

    word: Word
    sentence: str
    decided_by: str = ""
    """Series that decided, e.g. ``"gradients/late_token_level"``; empty when none did."""


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The headline of one stack, with the evidence along it."""

    headline: Headline
    chain: Evidence

    @property
    def path(self) -> str:
        """Path of the stack; ``""`` for a chain of modules."""
        stack = self.chain.axis.stack
        return stack.path if stack is not None else ""


def decide(evidence: Evidence) -> Headline:
    """The headline of a run.

    Precedence: non-finite, not enough data, dead, exploding or vanishing, drifting, flat. With S the Theil-Sen slope
    of log10 gradient over the middle 10..90 % of the stack times its length L: S > 2 vanishing, S < -2 exploding,
    1 < abs(S) <= 2 drifting, else flat. A step at one place is taken off before the fit: it is the finding ``knee``.
    The profile with the largest abs(S) decides and is named; when all are flat, the first one.

    Args:
        evidence: a run at one step.

    Returns:
        The headline, of the worst stack where several are judged.
    """
    return worst_of(verdicts(evidence)).headline


def verdicts(evidence: Evidence) -> tuple[Verdict, ...]:
    """The headline of the main stack, then those of the others; non-finite numbers are a matter of the whole run.

    Args:
        evidence: a run at one step.

    Returns:
        One per stack; further ones only where there is enough to judge.
    """
    whole = _nonfinite(evidence)
    if whole is not None:
        return (Verdict(whole, evidence),)
    main, *others = evidence.chains
    found = [Verdict(_of_chain(main), main), *(Verdict(_of_chain(c), c) for c in others if not _is_asleep(c))]
    found = [found[0], *(verdict for verdict in found[1:] if verdict.headline.word != "not enough data")]
    return tuple(found)


def worst_of(found: Sequence[Verdict]) -> Verdict:
    """The stack that decides the headline of the run, which says so.

    Dead before exploding or vanishing, then drifting, then flat, then not enough data; of two that explode or vanish
    the one with the larger abs(S) to a tenth; else the main one, then the longer one.

    Args:
        found: from `verdicts`.

    Returns:
        One of them, its sentence beginning with the name of the stack where there are several.
    """
    worst = max(found, key=_rank)
    if len(found) == 1:
        return worst
    sentence, others = worst.headline.sentence, len(found) - 1
    alike = f"as in the other {'stack' if others == 1 else f'{others} stacks'}"
    place = alike if worst.headline.word == "flat" else f"the worst of {len(found)} stacks"
    text = f"In {worst.path}, {place}, {sentence[0].lower()}{sentence[1:]}"
    return Verdict(replace(worst.headline, sentence=text), worst.chain)


def _rank(verdict: Verdict) -> tuple[int, float]:
    rank = {"dead": 3, "exploding": 2, "vanishing": 2, "drifting": 1, "flat": 0}.get(verdict.headline.word, -1)
    decided = verdict.chain.profiles.get(verdict.headline.decided_by)
    size = 0.0 if decided is None or rank not in (1, 2) else round(abs(decided.shape.total), 1)
    return rank, size


def _of_chain(chain: Evidence) -> Headline:
    return _cut(chain) or _no_data(chain) or _dead(chain) or _sloped(chain)


def _is_asleep(chain: Evidence) -> bool:
    """Whether weights of 0 at the start explain that nothing gets through, as in a control tower."""
    gradient = chain.gradient
    if gradient is None or not gradient.shape.stops:
        return False
    sleepers = asleep(chain)
    zero = [site.path for site, flag in zip(chain.axis.sites, gradient.shape.is_zero, strict=True) if flag]
    weights = [path for path in zero_sites(chain, "parameters/norm") if not path.endswith("bias")]
    return all(explains(sleepers, path) for path in zero) or (chain.steps.size == 1 and bool(weights))


def word_of(total: float, thresholds: Mapping[str, float] = DEFAULTS) -> Word:
    """The word for S decades over the stack.

    Args:
        total: S, positive when the gradient shrinks towards the input.
        thresholds: by name.

    Returns:
        The word.

    Example:
        >>> [word_of(s) for s in (4.5, -2.1, 2.0, -0.5)]
        ['vanishing', 'exploding', 'drifting', 'flat']
    """
    if total > thresholds["vanishing"]:
        return "vanishing"
    if -total > thresholds["exploding"]:
        return "exploding"
    return "drifting" if abs(total) > thresholds["drifting"] else "flat"


def word_for(shape: DepthProfile, thresholds: Mapping[str, float] = DEFAULTS) -> Word:
    """The word for a profile: that of S, unless only part of the stack has a gradient and its fitted layers span less.

    Args:
        shape: a profile with a slope.
        thresholds: by name.

    Returns:
        The word.
    """
    word = word_of(shape.total, thresholds)
    unseen = shape.is_partial and not shape.floored and word in thresholds and not shape.span > thresholds[word]
    return "drifting" if unseen else word


def is_level(evidence: Evidence) -> bool:
    """Whether every profile that counts is flat, and there is one.

    Args:
        evidence: a run at one step.

    Returns:
        False where there are too few layers to tell.
    """
    judged = evidence.judged
    return bool(judged) and all(word_for(profile.shape, evidence.thresholds) == "flat" for profile in judged)


def _nonfinite(evidence: Evidence) -> Headline | None:
    """Non-finite at the reported step, or on half of the recent ones; steps that a loss scaler skipped do not count."""
    skipped = skipped_steps(evidence)
    bad: set[int] = set()
    for direction in ("outputs", "gradients", "parameter_gradients"):
        history = nonfinite_history(evidence, direction)
        if history is not None:
            bad.update(int(step) for step, row in zip(history.steps, history.flags, strict=True) if row.any())
    loss = bad_loss(evidence)
    bad.update(loss.steps if loss is not None else ())
    recent = [int(step) for step in evidence.steps if int(step) not in skipped]
    hits = [step for step in recent if step in bad]
    if not hits or (hits[-1] != recent[-1] and 2 * len(hits) < len(recent)):
        return None
    first = min(bad - skipped)
    where = f"on {len(hits)} of the last {len(recent)} recorded steps, first at step {first}"
    cause = f"; the loss function produced it ({loss.name})" if loss is not None and loss.steps[0] == first else ""
    if cause and loss is not None and loss.of_nothing:
        cause += ", and every gradient is exactly 0: a mean over nothing, as where all labels are ignored"
    return Headline("non-finite", f"NaN or Inf was recorded {where if len(recent) > 1 else f'at step {first}'}{cause}.")


def _no_data(evidence: Evidence) -> Headline | None:
    gradient = evidence.gradient
    if evidence.steps.size == 0:
        return Headline("not enough data", "No step is recorded yet.")
    if gradient is None:
        return Headline("not enough data", _unrecorded(evidence))
    if gradient.shape.observed < MIN_LAYERS:
        seen = count(gradient.shape.observed, "layer with a gradient", "layers with a gradient")
        return Headline("not enough data", f"Found {seen}; a slope over depth needs at least {MIN_LAYERS}.")
    return None


def _unrecorded(evidence: Evidence) -> str:
    """Why there is no profile of output gradients."""
    if not any(key.startswith("gradients/") for key in evidence.run.keys()):  # noqa: SIM118 - a run is no mapping
        return "Output gradients were not recorded; add the probe 'gradients' (it is among the default ones)."
    return "No gradient was recorded: no backward pass reached a watched layer."


def _cut(evidence: Evidence) -> Headline | None:
    """No gradient at all in the trainable layers of the input side, of a quarter of the stack or more."""
    found = silence(evidence)
    if found is None or not found.missing:
        return None
    quiet = found.missing + found.zeros
    text = f"No gradient reaches {quiet} of {count(found.layers, 'layer')}, although they are trainable: it stops at "
    text += f"{found.boundary}, the one nearest the loss"
    gradient = evidence.gradient
    if gradient is None or gradient not in evidence.judged:
        return Headline("dead", f"{text}.", gradient.key if gradient is not None else "")
    rest = count(gradient.shape.usable, "layer")
    text += f". In the {rest} that get one, {gradient.title} has S = {decades(gradient.shape.total)} decades."
    return Headline("dead", text, gradient.key)


def _dead(evidence: Evidence) -> Headline | None:
    """Exactly zero at the input end of the chain, or in more than half of it, without underflow."""
    gradient = evidence.gradient
    if gradient is None:
        return None
    shape, sites = gradient.shape, evidence.axis.sites
    if shape.floored == shape.observed:
        return Headline("dead", f"The {gradient.title} lies under the float32 floor in every layer.", gradient.key)
    if not shape.stops:
        return None
    highest = sites[int(np.flatnonzero(shape.is_zero)[-1])].path
    share = f"{shape.zeros} of {count(shape.observed, 'layer')}"
    upto = f", up to {highest}" if shape.zeros < shape.observed else ""
    return Headline(
        "dead", f"The {gradient.title} is exactly 0 in {share}{upto}: no signal gets through.", gradient.key
    )


def _sloped(evidence: Evidence) -> Headline:
    judged = evidence.judged
    if not judged:
        return Headline("not enough data", "The recorded gradients leave too few layers for a slope over depth.")
    worst = max(judged, key=lambda profile: _gravity(profile, evidence.thresholds))
    return Headline(word_for(worst.shape, evidence.thresholds), _sentence(evidence, worst, judged), worst.key)


def _gravity(profile: NamedProfile, thresholds: Mapping[str, float]) -> tuple[int, float]:
    """Order of precedence: by word, then by abs(S) to a tenth, so that the output gradient goes before a near tie."""
    word = word_for(profile.shape, thresholds)
    rank = {"flat": 0, "drifting": 1}.get(word, 2)
    return rank, round(abs(profile.shape.total), 1) if rank else 0.0


def _sentence(evidence: Evidence, worst: NamedProfile, judged: tuple[NamedProfile, ...]) -> str:
    shape, unit = worst.shape, evidence.axis.unit
    over = f"over {count(shape.covered, unit)}"
    if shape.is_partial:
        over += f" of {shape.length:g}, the part that gets a gradient"
    change = times(-shape.total)
    slope = (
        f"slope {'+' if shape.slope > 0 else ''}{number(shape.slope)} decades per {unit}, "
        if abs(shape.total) >= _TELLING
        else ""
    )
    verb = {"vanishing": "shrinks", "exploding": "grows", "drifting": "drifts", "flat": "stays level"}
    verdict = verb[word_for(shape, evidence.thresholds)]
    text = f"{worst.title[0].upper()}{worst.title[1:]} {verdict} from output to input: "
    text += f"fitted {change} {over}, {slope}S = {decades(shape.total)} decades"
    text += _left_out(evidence, shape)
    others = [f"{p.title} {decades(p.shape.total)}" for p in judged if p is not worst]
    return f"{text} ({', '.join(others)})." if others else f"{text}."


def _left_out(evidence: Evidence, shape: DepthProfile) -> str:
    """The step at one place that the slope does not count."""
    if shape.step is None:
        return ""
    lower, upper = (evidence.axis.sites[i].path for i in (shape.step.lower, shape.step.upper))
    return f", without the step {times(-shape.step.change)} from {upper} to {lower}"
