"""Rules on gates and residual weights: closed, dead, asleep by initialisation, stuck, saturated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.asleep import Sleeper, asleep
from keelscope.diagnosis.finding import Finding, Severity, name_sites
from keelscope.diagnosis.gates import Gate, gates_of
from keelscope.diagnosis.rules.units import flat_activations
from keelscope.formatting import count, number

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["RULES", "gate_closed", "gate_dead", "saturated", "zero_grad_by_init", "zero_grad_stuck"]

_BY_DESIGN = 0.3  # of 1/L: what Keel and its gated form leave to a branch under a norm


def gate_dead(evidence: Evidence) -> Iterator[Finding]:
    """A gate lets exactly nothing through and cannot open again: no gradient at the gate, none in its branch.

    Formula: weight left to the branch <= 1e-7, every parameter gradient of the branch exactly 0 on all recent steps,
    and the gradient at the gate exactly 0 or, for a constant, not there.

    Source: a sigmoid whose logit left the range, or clamp(T, 0, 1) beyond its end: the local slope is 0 (measured in
    keelscope's reference on the gate of Keel's seed document; a raw T = 1 is alive instead, see `zero_grad_by_init`).

    Remedy: initialise the gate inside its range, T = L/(L+1) for L sub-layers, or use a raw parameter.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    dead = [sleeper for sleeper in asleep(evidence) if not sleeper.is_alive]
    if dead:
        yield _finding(
            evidence, "gate_dead", Severity.ERROR, dead,
            f"{_gates(dead)} nothing through and {'gets' if len(dead) == 1 else 'get'} no gradient: the gradient is "
            f"exactly 0 at the gate and in {_behind(dead)}. Neither can change.",
            remedy="Start the gate inside its range (T = L/(L+1) over L sub-layers), or make it a raw parameter.",
        )  # fmt: skip


def zero_grad_by_init(evidence: Evidence) -> Iterator[Finding]:
    """A branch without gradient behind a weight of exactly 0 that has one: by design, and over after one step.

    Formula: parameter gradients exactly 0 on all recent steps, beside a weight (no bias) of exactly 0, or behind a gate
    that leaves exactly nothing to the branch, whose own gradient is not 0.

    Source: ReZero (arXiv:2003.04887), SkipInit (arXiv:2002.10444), LoRA (arXiv:2106.09685), Fixup (arXiv:1901.09321), a
    raw gate at T = 1.

    Remedy: none needed; a finding `zero_grad_stuck` follows if it is still so 9 steps later.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    alive = [sleeper for sleeper in asleep(evidence) if sleeper.is_alive]
    if alive and not _is_lasting(evidence):
        verbs = ("multiplies", "gets") if len(alive) == 1 else ("multiply", "get")
        yield _finding(
            evidence, "zero_grad_by_init", Severity.INFO, alive,
            f"The gradient is exactly 0 in {_behind(alive)}: {_keys(alive)} {verbs[0]} it by exactly 0 on its way "
            f"there but {verbs[1]} a gradient: zero initialisation, over after one step.",
            remedy="None needed: the weight moves first and the branch follows.",
        )  # fmt: skip


def zero_grad_stuck(evidence: Evidence) -> Iterator[Finding]:
    """What should have been over after one step is not: the weight in front of the branch has a gradient and stays 0.

    Formula: as `zero_grad_by_init`, on all recent steps, which span 9 optimizer steps or more.

    Source: a weight left out of the optimizer, a learning rate of 0, or a weight that is reset each step.

    Remedy: check that the named weights are among the optimizer's parameters and that their learning rate is not 0.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    alive = [sleeper for sleeper in asleep(evidence) if sleeper.is_alive]
    if alive and _is_lasting(evidence):
        steps = int(evidence.steps[-1] - evidence.steps[0])
        yield _finding(
            evidence, "zero_grad_stuck", Severity.WARNING, alive,
            f"For {steps} steps the gradient has been exactly 0 in {_behind(alive)}: {_keys(alive)} in front "
            f"{'has' if len(alive) == 1 else 'have'} a gradient but {'does' if len(alive) == 1 else 'do'} not move.",
            remedy="Check that these weights are in the optimizer and that their learning rate is not 0.",
        )  # fmt: skip


def gate_closed(evidence: Evidence) -> Iterator[Finding]:
    """A gate lets next to nothing of its branch through, so that the branch hardly trains.

    Formula: weight left to the branch < 0.02: its mean for gates computed from the input, its largest entry for
    parameters. Parameters on the branch alone count from step 1000 on, since LayerScale and ReZero start near 0; convex
    gates (T and 1 - T) count at once. Not meant: constants, and
    under a norm a share of 0.3/L or more, which is what Keel leaves to each of L branches (it measures 1/L).

    Source: Highway gates with bias -3 start at 0.047, with -6 at 0.0025, where the branch gets 1/400 of the gradient;
    majumderb/rezero#16.

    Remedy: raise the bias of the gate (-1 to -3), or check the weight decay on it.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding.
    """
    sleeping = {sleeper.weight for sleeper in asleep(evidence)}
    depth = max(1, len(evidence.run.info.sublayers))
    limit = evidence.thresholds["gate_closed"]
    closed = [
        g
        for g in gates_of(evidence)
        if g.path not in sleeping and _is_closed(g, evidence.step, depth=depth, limit=limit)
    ]
    if not closed:
        return
    paths = tuple(gate.path for gate in closed)
    weight = float(np.median([gate.branch_weight for gate in closed]))
    yield Finding(
        "gate_closed",
        Severity.WARNING,
        f"{count(len(paths), 'gate')} ({name_sites(paths)}) {'lets' if len(paths) == 1 else 'let'} almost nothing of "
        f"the branch through: weight {number(weight)}{' in the median' if len(paths) > 1 else ''}, limit {limit:g}.",
        sites=paths,
        steps=_recent(evidence),
        value=weight,
        threshold=limit,
        remedy="Raise the gate's bias (-1 to -3 is usual), or take weight decay off it.",
    )


def saturated(evidence: Evidence) -> Iterator[Finding]:
    """Gates or activations at the flat end of their sigmoid, tanh, clamp or softmax: hardly any gradient passes.

    Formula: in more than half of the entries the slope of the gate with respect to its logit is < 1e-3; the same of
    modules Sigmoid, Tanh, Hardsigmoid and Hardtanh, and of rows of a Softmax whose largest weight is > 0.999.

    Source: the half is that of smdebug's SaturatedActivation and AUTOTRAINER; a slope of 1e-3 is a sigmoid beyond
    +-6.9. A raw parameter has slope 1 and cannot saturate.

    Remedy: initialise the logit nearer to 0, or use a raw parameter.

    Args:
        evidence: a run at one step.

    Yields:
        At most one finding on gates, and one on other activations.
    """
    yield from flat_activations(evidence)
    shares = {gate.path: gate.values["saturated_fraction"] for gate in gates_of(evidence)}
    limit = evidence.thresholds["saturated"]
    flat = {path: share for path, share in shares.items() if share > limit}
    if not flat:
        return
    worst = max(flat.values())
    yield Finding(
        "saturated",
        Severity.WARNING,
        f"{count(len(flat), 'gate')} ({name_sites(list(flat))}) {'is' if len(flat) == 1 else 'are'} saturated in up to "
        f"{100 * worst:.0f} % of the entries: their gradient is 1000 times smaller than that of a raw weight, or 0.",
        sites=tuple(flat),
        steps=_recent(evidence),
        value=worst,
        threshold=limit,
        remedy="Initialise the gate's logit nearer to 0, or use a raw parameter.",
    )


def _is_closed(gate: Gate, step: int, *, depth: int, limit: float) -> bool:
    if not gate.branch_weight < limit or not gate.is_learned:
        return False
    if gate.is_starting(step, limit):
        return False
    under_norm = any(info.norm_after or info.form.startswith("n(") for info in gate.infos)
    share = gate.branch_weight / gate.shortcut_weight if gate.shortcut_weight > 0 else gate.branch_weight
    return not (under_norm and share >= _BY_DESIGN / depth)


def _is_lasting(evidence: Evidence) -> bool:
    """Nine steps by default: what ten rows in a row span, the longest window of a verdict."""
    span = int(evidence.steps[-1] - evidence.steps[0]) if evidence.steps.size else 0
    return evidence.steps.size > 1 and span >= evidence.thresholds["zero_grad_stuck"]


def _gates(sleepers: Sequence[Sleeper]) -> str:
    paths = [sleeper.weight for sleeper in sleepers]
    return f"{count(len(paths), 'gate')} ({name_sites(paths)}) {'lets' if len(paths) == 1 else 'let'}"


def _keys(sleepers: Sequence[Sleeper]) -> str:
    paths = [sleeper.weight for sleeper in sleepers]
    return f"{count(len(paths), 'weight')} ({name_sites(paths)})"


def _behind(sleepers: Sequence[Sleeper]) -> str:
    paths = [path for sleeper in sleepers for path in sleeper.parameters]
    return f"{count(len(paths), 'parameter')} ({name_sites(paths)})"


def _finding(
    evidence: Evidence, rule: str, severity: Severity, sleepers: Sequence[Sleeper], statement: str, *, remedy: str
) -> Finding:
    sites = tuple(path for sleeper in sleepers for path in sleeper.parameters)
    return Finding(rule, severity, statement, sites, _recent(evidence), 0.0, 0.0, remedy)


def _recent(evidence: Evidence) -> tuple[int, int] | None:
    return (int(evidence.steps[0]), int(evidence.steps[-1])) if evidence.steps.size else None


RULES = (gate_dead, gate_closed, saturated, zero_grad_by_init, zero_grad_stuck)
