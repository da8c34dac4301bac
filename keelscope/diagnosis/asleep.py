"""Branches without any gradient behind a weight or gate of exactly 0, told apart by whether that weight can wake them.

ReZero, SkipInit, LoRA, Fixup and a gate at T = 1 start so: the weight has a gradient, moves, and the branch follows. A
saturated gate has none, and both stay as they are. Used by the rules on gates and on zero gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from keelscope.diagnosis.evidence import PARAMETER_GRADIENT
from keelscope.diagnosis.gates import Gate, gates_of

if TYPE_CHECKING:
    from keelscope.diagnosis.evidence import Evidence

__all__ = ["Sleeper", "asleep", "explains", "zero_sites"]

_CLOSED = 1e-7  # 1 - T of a float32 gate at 1 up to one unit in the last place


@dataclass(frozen=True, slots=True)
class Sleeper:
    """Parameters whose gradient is exactly 0 because one weight is."""

    weight: str
    """Path of the weight or gate."""
    parameters: tuple[str, ...]
    """Paths of the parameters behind it."""
    inside: str
    """The module that holds both; ``""`` for the model itself."""
    is_alive: bool
    """Whether the weight itself gets a gradient."""


def asleep(evidence: Evidence) -> tuple[Sleeper, ...]:
    """Everything that sleeps at the reported step.

    Args:
        evidence: a run at one step.

    Returns:
        One entry per weight or gate; a parameter is named once.
    """
    if "asleep" not in evidence.kept:
        evidence.kept["asleep"] = tuple(_found(evidence))
    return cast("tuple[Sleeper, ...]", evidence.kept["asleep"])


def explains(sleepers: Sequence[Sleeper], path: str) -> bool:
    """Whether a zero gradient of a module or parameter is explained by a sleeping branch.

    Args:
        sleepers: of the run.
        path: dotted path of a module or parameter.

    Returns:
        True if it is one, or the weight; lies in the module that holds both, or beside it in the same one; or is a
        module behind that weight.
    """
    return any(
        path in sleeper.parameters
        or path == sleeper.weight
        or _within(path, sleeper.weight)
        or _beside(path, sleeper.inside)
        or _within(path, sleeper.inside)
        or (not _within(sleeper.weight, path) and any(_within(parameter, path) for parameter in sleeper.parameters))
        for sleeper in sleepers
    )


def zero_sites(evidence: Evidence, key: str) -> list[str]:
    """Paths whose recent values are all exactly 0, input side first.

    Args:
        evidence: a run at one step.
        key: ``group/statistic``.

    Returns:
        Paths; those not observed on some of the steps included.
    """
    series = evidence.window(key)
    if series is None or len(series) == 0:
        return []
    values = np.asarray(series.values)
    zero = ((values == 0) | np.isnan(values)).all(axis=0) & (values == 0).any(axis=0)
    return [path for path, flag in zip(series.paths, zero, strict=True) if flag]


def _found(evidence: Evidence) -> Iterator[Sleeper]:
    silent = zero_sites(evidence, PARAMETER_GRADIENT)
    if not silent:
        return
    taken: set[str] = set()
    for sleeper in (*_behind_gates(evidence, silent), *_behind_weights(evidence, silent)):
        fresh = tuple(path for path in sleeper.parameters if path not in taken)
        taken.update(fresh)
        if fresh:
            yield Sleeper(sleeper.weight, fresh, sleeper.inside, sleeper.is_alive)


def _behind_gates(evidence: Evidence, silent: Sequence[str]) -> Iterator[Sleeper]:
    """Branches all of whose gradients are 0 behind a gate that lets exactly nothing through."""
    everything = [site.path for site in evidence.sites(PARAMETER_GRADIENT)]
    profile = evidence.gradient
    stops = profile is not None and profile.shape.stops
    for gate in gates_of(evidence):
        if not gate.branch_weight <= _CLOSED or (stops and not gate.gradient > 0):
            continue
        for inside in _branches(evidence, gate):
            members = [p for p in everything if p.startswith(f"{inside}.") and not _is_of(gate, p)]
            if members and set(members) <= set(silent):
                yield Sleeper(gate.path, tuple(members), inside, bool(gate.gradient > 0))


def _branches(evidence: Evidence, gate: Gate) -> Iterator[str]:
    """The module of each branch that the gate weighs: as recorded, else as the structure says, else around the gate."""
    sites = evidence.sites("sublayers/alpha")
    for index, info in zip(gate.sublayers, gate.infos, strict=True):
        recorded = sites[index].path if index < len(sites) else ""
        yield info.branch or recorded or gate.path.rpartition(".")[0]
    if not gate.sublayers:
        yield gate.path.rpartition(".")[0]


def _is_of(gate: Gate, parameter: str) -> bool:
    return parameter == gate.path or parameter.startswith(f"{gate.path}.")


def _behind_weights(evidence: Evidence, silent: Sequence[str]) -> Iterator[Sleeper]:
    """Parameters beside a weight of exactly 0 that gets a gradient, in the innermost module of the block with both."""
    keys = _zero_weights(evidence)
    entries = {site.path: (site.stack, site.position) for site in evidence.sites(PARAMETER_GRADIENT)}
    homes: dict[tuple[str, str], list[str]] = {}
    for path in silent:
        for inside in _containers(path):
            beside = (k for k in keys if k.rpartition(".")[0] == inside or _within(k, inside))
            key = next((k for k in beside if entries[k] == entries[path]), "")
            if key:
                homes.setdefault((key, inside), []).append(path)
                break
    for (key, inside), paths in homes.items():
        if any(not path.endswith("bias") for path in paths):
            yield Sleeper(key, tuple(paths), inside, is_alive=True)


def _containers(path: str) -> list[str]:
    """The modules that a parameter lies in, innermost first; the model itself only for its direct parameters."""
    parts = path.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)] or [""]


def _beside(path: str, module: str) -> bool:
    """Whether a path is that of a neighbour in the same module, not in the model itself, or of its parameter."""
    holder, own = module.rpartition(".")[0], path.rpartition(".")[0]
    return bool(holder) and holder in (own, own.rpartition(".")[0])


def _within(path: str, module: str) -> bool:
    return bool(module) and path.startswith(f"{module}.")


def _zero_weights(evidence: Evidence) -> list[str]:
    """Weights, biases left out, that are exactly 0 and get a gradient."""
    found, gradient = evidence.latest("parameters/norm"), evidence.recent(PARAMETER_GRADIENT)
    if found is None or gradient is None:
        return []
    alive = {s.path for s, g in zip(evidence.sites(PARAMETER_GRADIENT), gradient, strict=True) if g > 0}
    zero = [s.path for s, norm in zip(evidence.sites("parameters/norm"), found[1], strict=True) if norm == 0]
    return [path for path in zero if path in alive and not path.endswith("bias")]
