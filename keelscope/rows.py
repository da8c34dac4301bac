"""From the observations of one step to one value per site: fetch once, merge on the host, finish.

`keelscope.session` calls `probe_values` for each probe when a row closes; `module_calls` and `parameter_calls` give the
same observations unmerged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keelscope.board import Fetched, Slot
from keelscope.calls import Call, CallRecord, ParameterCalls, ParameterRecord, TermSlots, terms_of
from keelscope.probe import Probe, Tap
from keelscope.statistics import NORM, Statistic, Terms

__all__ = [
    "Observations",
    "RowValues",
    "module_calls",
    "module_observations",
    "parameter_observations",
    "probe_extents",
    "probe_values",
    "total_norm",
]

Observations = Mapping[int, list[TermSlots]]
"""Site index -> its observations on this step, in order."""
Values = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class RowValues:
    """What one step showed, by group."""

    values: dict[str, dict[str, NDArray[np.float64]]]
    """Statistic -> ``[site, ...]``, NaN where nothing was seen."""
    observed: dict[str, NDArray[np.bool_]]
    """``[site]`` for the parameter groups, where every statistic of a seen parameter is a computed one."""


def total_norm(row: RowValues, group: str) -> float:
    """Norm of all parameter gradients together; NaN if one of them is NaN, or none arrived."""
    seen = row.values[group]["norm"][row.observed[group]]
    return float(np.sqrt(np.square(seen).sum())) if seen.size else math.nan


def module_observations(tap: Tap, calls: Iterable[CallRecord]) -> Observations:
    """Observations of one tap over the calls of a step, by site.

    Forwards without gradient (a teacher, a validation pass) count only if the step has no other forward.

    Args:
        tap: a tap of modules.
        calls: every call of the step, in order.

    Returns:
        Observations by site index; sites without one are absent.
    """
    calls = list(calls)
    if any(call.differentiable for call in calls):
        calls = [call for call in calls if call.differentiable]
    found: dict[int, list[TermSlots]] = {}
    for call in calls:
        kept = [slots for slots in _events(tap, call) if slots]
        if kept:
            found.setdefault(call.site, []).extend(kept)
    return found


def _events(tap: Tap, call: CallRecord) -> list[TermSlots]:
    if tap.in_backward:
        return call.first_gradient()
    if tap is Tap.ATTENTION:
        return call.attention
    return [call.inputs if tap is Tap.INPUT else call.outputs]


def parameter_observations(tap: Tap, records: Mapping[int, ParameterRecord]) -> Observations:
    """Observations of one tap over the parameters of a step.

    Args:
        tap: a tap of parameters.
        records: parameter index -> record.

    Returns:
        Observations by parameter index; parameters without one are absent.
    """
    picks: dict[Tap, Callable[[ParameterRecord], list[TermSlots]]] = {
        Tap.PARAMETER: lambda record: [record.weight],
        Tap.PARAMETER_GRADIENT: lambda record: record.gradient(),
        Tap.UPDATE: lambda record: [record.update],
    }
    pick = picks[tap]
    found = {i: [slots for slots in pick(record) if slots] for i, record in records.items()}
    return {i: observations for i, observations in found.items() if observations}


def probe_values(
    probe: Probe,
    observations: Observations,
    fetched: Fetched,
    sites: int,
    *,
    factor: float = 1.0,
    extents: Mapping[str, int] | None = None,
) -> tuple[Values, NDArray[np.bool_]]:
    """Every statistic of a probe over the whole site axis.

    Args:
        probe: the probe; its name keys the observations.
        observations: what its tap saw.
        fetched: terms of the step.
        sites: length of the site axis.
        factor: what the tensors are multiplied by, to take a loss scale out of gradients.
        extents: axis -> how many of its coordinates are kept, see `probe_extents`.

    Returns:
        Statistic name -> ``[site, ...]``, NaN where a site was not observed; and ``[site]``, whether it was.
    """
    merged = {terms: _merged(probe, terms, observations, fetched) for terms in terms_of(probe)}
    observed = np.zeros(sites, dtype=np.bool_)
    for found in merged.values():
        observed[found.sites] = True
    kept = {s.name: (slice(None), *(slice((extents or {}).get(dim)) for dim in s.dims)) for s in probe.statistics}
    return {s.name: _spread(s, merged[s.terms], sites, factor)[kept[s.name]] for s in probe.statistics}, observed


def probe_extents(probe: Probe, observations: Observations, fetched: Fetched) -> dict[str, int]:
    """How many coordinates the axes have whose length only the model knows.

    Args:
        probe: the probe.
        observations: what its tap saw.
        fetched: terms of the step.

    Returns:
        Axis -> number, the largest over sites, at least 1.
    """
    found: dict[str, int] = {}
    for statistic in probe.statistics:
        if statistic.extent is not None:
            terms = statistic.terms
            counts = statistic.extent(terms.named(_merged(probe, terms, observations, fetched).union))
            found[statistic.dims[0]] = max(1, int(counts.max(initial=0)))
    return found


@dataclass(frozen=True, slots=True)
class _Merged:
    """Terms of the observed sites, ``[observed site, column]``."""

    sites: list[int]
    first: NDArray[np.float64]
    union: NDArray[np.float64]


def _merged(probe: Probe, terms: Terms, observations: Observations, fetched: Fetched) -> _Merged:
    key = (probe.name, terms)
    slots = {site: [found[key] for found in several if key in found] for site, several in observations.items()}
    slots = {site: several for site, several in slots.items() if several}
    first = _gather([several[0] for several in slots.values()], terms, fetched)
    union = first.copy()
    for row, several in enumerate(slots.values()):
        for device, _, index in several[1:]:
            union[row] = terms.merge(union[row], fetched[device, terms][index])
    return _Merged(list(slots), first, union)


def _gather(slots: list[Slot], terms: Terms, fetched: Fetched) -> NDArray[np.float64]:
    """Look slots up, ``[slot, column]``; one indexing per source."""
    sources = {source for source, _, _ in slots}
    if len(sources) == 1:
        return fetched[sources.pop(), terms][[index for _, _, index in slots]]
    gathered = np.empty((len(slots), len(terms.columns)))
    for source in sources:
        rows = [row for row, (where, _, _) in enumerate(slots) if where == source]
        gathered[rows] = fetched[source, terms][[slots[row][2] for row in rows]]
    return gathered


def _spread(statistic: Statistic, merged: _Merged, sites: int, factor: float) -> NDArray[np.float64]:
    """Finished values at their place on the site axis."""
    extra = tuple(len(statistic.coords[dim]) for dim in statistic.dims)
    values = np.full((sites, *extra), np.nan)
    if merged.sites:
        columns = merged.union if statistic.mergeable else merged.first
        values[merged.sites] = statistic.of(statistic.terms.rescaled(columns, factor))
    return values


def _look_up(slot: Slot, fetched: Fetched) -> NDArray[np.float64]:
    device, terms, index = slot
    return np.asarray(fetched[device, terms][index])


def module_calls(calls: Iterable[CallRecord], probes: Iterable[Probe], fetched: Fetched) -> dict[int, list[Call]]:
    """Every call of a step by site, as plain numbers.

    Args:
        calls: the records, in call order.
        probes: the probes of the watch.
        fetched: terms of the step.

    Returns:
        Site index -> calls in order.
    """
    probes = list(probes)
    before, after = ([probe for probe in probes if probe.tap is tap] for tap in (Tap.INPUT, Tap.OUTPUT))
    found: dict[int, list[Call]] = {}
    for call in calls:
        leaves = {path: tuple(_norm(slots, fetched) for slots in events) for path, events in call.leaves.items()}
        values = _plain(before, call.inputs, fetched), _plain(after, call.outputs, fetched)
        found.setdefault(call.site, []).append(Call(call.grad_enabled, *values, leaves))
    return found


def parameter_calls(records: Mapping[int, ParameterRecord], fetched: Fetched) -> dict[int, ParameterCalls]:
    """Gradient norms of every backward pass, by parameter.

    Args:
        records: parameter index -> record.
        fetched: terms of the step.

    Returns:
        Parameter index -> its gradients.
    """
    return {i: ParameterCalls(tuple(_norm(slots, fetched) for slots in record.leaf)) for i, record in records.items()}


def _plain(probes: Iterable[Probe], slots: TermSlots, fetched: Fetched) -> dict[str, float]:
    """Scalar statistics of one observation, with the number of entries."""
    plain: dict[str, float] = {}
    for probe in probes:
        for statistic in probe.statistics:
            slot = slots.get((probe.name, statistic.terms))
            if slot is not None and not statistic.dims:
                terms = _look_up(slot, fetched)
                plain.setdefault(statistic.name, float(statistic.of(terms)))
                plain.setdefault("count", float(statistic.terms.named(terms).get("count", np.nan)))
    return plain


def _norm(slots: TermSlots, fetched: Fetched) -> float:
    """Euclidean norm from whichever terms hold the squares."""
    for (_, terms), slot in slots.items():
        columns = terms.named(_look_up(slot, fetched))
        if "squares" in columns:
            return float(np.sqrt(columns["squares"]))
        if "max_abs" in columns and "m2" in columns:
            return float(NORM.of(_look_up(slot, fetched)))
    return float("nan")
