"""From the observations of one step to one value per site: fetch once, merge on the host, finish.

`keelscope.session` calls `probe_values` for each probe when a row closes; `module_calls` and `parameter_calls` give the
same observations unmerged.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keelscope.board import Fetched, Slot, gather
from keelscope.calls import Call, CallRecord, ParameterCalls, ParameterRecord, TermSlots, terms_of
from keelscope.pages import Blocks, no_blocks
from keelscope.probe import Probe, Tap, group_of
from keelscope.statistics import NORM, Columns, Statistic, Terms
from keelscope.waiting import WaitingGroup

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
    later: dict[str, WaitingGroup] = field(default_factory=dict)
    """Groups that are finished when they are written."""


def total_norm(row: RowValues, probe: Probe) -> float | None:
    """Norm of all parameter gradients together.

    Args:
        row: the row.
        probe: of parameter gradients.

    Returns:
        The norm, NaN if one of them is NaN or none arrived; None if the probe takes no norms.
    """
    group = group_of(probe)
    if group in row.later:
        return row.later[group].total_norm(probe)
    if "norm" not in row.values.get(group, {}):
        return None
    seen = row.values[group]["norm"][row.observed[group]]
    return float(np.sqrt(np.square(seen).sum())) if seen.size else math.nan


def module_observations(
    tap: Tap,
    calls: Iterable[CallRecord],
    arrivals: Mapping[int, list[TermSlots]] | None = None,
    *,
    trained: bool = False,
) -> Observations:
    """Observations of one tap over the calls of a step, by site.

    Forwards without gradient (a teacher, a validation pass) count only if the step has no other forward.

    Args:
        tap: a tap of modules.
        calls: every call of the step, in order.
        arrivals: gradients of earlier calls of these sites.
        trained: whether the step has other forwards with gradient.

    Returns:
        Observations by site index; sites without one are absent.
    """
    calls = list(calls)
    counted = [call for call in calls if call.grad_enabled or call.recomputed]
    counted = counted if counted or trained else calls
    found: dict[int, list[TermSlots]] = {}
    if tap is Tap.OUTPUT_GRADIENT and arrivals:
        found = {site: list(several) for site, several in arrivals.items()}
    for site, kept in _seen(tap, counted):
        if site in found:
            found[site].extend(kept)
        else:
            found[site] = kept
    return found


def _seen(tap: Tap, calls: list[CallRecord]) -> list[tuple[int, list[TermSlots]]]:
    """Site and observations of every call that has any; written out, since it runs over every call of every step."""
    if tap is Tap.OUTPUT:
        return [(call.site, [call.outputs]) for call in calls if call.outputs]
    if tap is Tap.INPUT:
        return [(call.site, [call.inputs]) for call in calls if call.inputs]
    if tap is Tap.ATTENTION:
        several = [(call.site, call.attention) for call in calls]
    else:
        several = [(call.site, call.first_gradient()) for call in calls]
    return [(site, kept) for site, slots in several if (kept := [one for one in slots if one])]


def parameter_observations(
    tap: Tap, records: Mapping[int, ParameterRecord], summed: Container[int] = ()
) -> Observations:
    """Observations of one tap over the parameters of a step.

    Args:
        tap: a tap of parameters.
        records: parameter index -> record.
        summed: parameters whose gradient of the whole step is known otherwise.

    Returns:
        Observations by parameter index; parameters without one are absent.
    """
    if tap is Tap.PARAMETER:
        return {i: [record.weight] for i, record in records.items() if record.weight}
    if tap is Tap.UPDATE:
        return {i: [record.update] for i, record in records.items() if record.update}
    if tap is Tap.STEP_GRADIENT:
        return {i: [record.used] for i, record in records.items() if record.used}
    accumulated = {i: [record.accumulated] for i, record in records.items() if record.accumulated}
    parts = ((i, [one for one in record.leaf if one]) for i, record in records.items() if record.leaf)
    leaves = {i: kept for i, kept in parts if kept and i not in summed}
    return leaves | accumulated if leaves else accumulated


def probe_values(
    probe: Probe,
    observations: Observations,
    fetched: Fetched,
    sites: int,
    *,
    factor: float = 1.0,
    extents: Mapping[str, int] | None = None,
    blocks: Blocks = no_blocks,
) -> tuple[Values, NDArray[np.bool_]]:
    """Every statistic of a probe over the whole site axis.

    Args:
        probe: the probe; its name keys the observations.
        observations: what its tap saw.
        fetched: terms of the step.
        sites: length of the site axis.
        factor: what the tensors are multiplied by, to take a loss scale out of gradients.
        extents: axis -> how many of its coordinates are kept, see `probe_extents`.
        blocks: what the kernel saw before all of that.

    Returns:
        Statistic name -> ``[site, ...]``, NaN where a site was not observed; and ``[site]``, whether it was.
    """
    merged = {terms: _merged(probe, terms, observations, fetched, blocks) for terms in terms_of(probe)}
    observed = np.zeros(sites, dtype=np.bool_)
    for found in merged.values():
        observed[found.sites] = True
    with np.errstate(all="ignore"):
        columns = {terms: _columns(terms, found, factor) for terms, found in merged.items()}
        values = {
            s.name: _spread(s, found.sites, columns[s.terms], sites, is_ordered=found.is_ordered)
            for s in probe.statistics
            for found in [merged[s.terms]]
        }
    for statistic in probe.statistics:
        if statistic.dims and extents:
            kept = (slice(extents.get(dim)) for dim in statistic.dims)
            values[statistic.name] = values[statistic.name][slice(None), *kept]
    return values, observed


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

    sites: NDArray[np.intp]
    first: NDArray[np.float64]
    union: NDArray[np.float64]
    is_ordered: bool = False
    """Whether sites rise."""


def _merged(
    probe: Probe, terms: Terms, observations: Observations, fetched: Fetched, blocks: Blocks = no_blocks
) -> _Merged:
    key = (probe.name, terms)
    block = blocks(probe, terms)
    if block is not None and not observations:
        return _Merged(block.sites, block.rows, block.rows, is_ordered=True)
    several = [(site, found) for site, slots in observations.items() if (found := [s[key] for s in slots if key in s])]
    packed = {} if block is None else dict(zip(block.sites.tolist(), block.rows, strict=True))
    sites: list[int] = []
    firsts: list[Slot] = []
    repeated: list[tuple[int, list[Slot]]] = []
    for site, found in several:
        first = packed.pop(site, None)
        slots = found if first is None else [first.tobytes(), *found]
        if len(slots) > 1:
            repeated.append((len(sites), slots[1:]))
        sites.append(site)
        firsts.append(slots[0])
    first = gather(firsts, terms, fetched)
    if packed:
        sites += packed
        first = np.concatenate([first, np.stack(list(packed.values()))])
    union = first.copy() if repeated else first
    for row, others in repeated:
        for more in gather(others, terms, fetched):
            union[row] = terms.merge(union[row], more)
    return _Merged(np.array(sites, dtype=np.intp), first, union)


def _columns(terms: Terms, merged: _Merged, factor: float) -> tuple[Columns, Columns]:
    """Named columns ``[observed site]`` of all observations, and of the first of each site."""
    union = terms.named(terms.rescaled(merged.union, factor))
    if merged.first is merged.union:
        return union, union
    return union, terms.named(terms.rescaled(merged.first, factor))


def _spread(
    statistic: Statistic, observed: NDArray[np.intp], columns: tuple[Columns, Columns], sites: int, *, is_ordered: bool
) -> NDArray[np.float64]:
    """Finished values at their place on the site axis."""
    finished = statistic.finish(columns[0] if statistic.mergeable else columns[1]) if observed.size else None
    if len(observed) == sites and is_ordered and finished is not None:
        return np.array(finished, dtype=np.float64)
    values = np.full((sites, *(len(statistic.coords[dim]) for dim in statistic.dims)), np.nan)
    if finished is not None:
        values[observed] = finished
    return values


def module_calls(
    paths: Sequence[str], calls: Iterable[CallRecord], probes: Iterable[Probe], fetched: Fetched
) -> dict[str, list[Call]]:
    """Every call of a step by site, as plain numbers.

    Args:
        paths: of the sites.
        calls: the records, in call order.
        probes: the probes of the watch.
        fetched: terms of the step.

    Returns:
        Path -> calls in order.
    """
    probes = list(probes)
    before, after = ([probe for probe in probes if probe.tap is tap] for tap in (Tap.INPUT, Tap.OUTPUT))
    found: dict[str, list[Call]] = {}
    for call in calls:
        leaves = {path: tuple(_norm(slots, fetched) for slots in events) for path, events in call.leaves.items()}
        values = _plain(before, call.inputs, fetched), _plain(after, call.outputs, fetched)
        dtype = str(call.dtype).removeprefix("torch.") if call.dtype else ""
        found.setdefault(paths[call.site], []).append(Call(call.grad_enabled, *values, leaves, dtype))
    return found


def parameter_calls(
    paths: Sequence[str], records: Mapping[int, ParameterRecord], fetched: Fetched
) -> dict[str, ParameterCalls]:
    """Gradient norms of every backward pass, by parameter.

    Args:
        paths: of the parameters.
        records: parameter index -> record.
        fetched: terms of the step.

    Returns:
        Path -> its gradients.
    """
    return {
        paths[i]: ParameterCalls(tuple(_norm(slots, fetched) for slots in record.leaf)) for i, record in records.items()
    }


def _plain(probes: Iterable[Probe], slots: TermSlots, fetched: Fetched) -> dict[str, float]:
    """Scalar statistics of one observation, with the number of entries."""
    plain: dict[str, float] = {}
    for probe in probes:
        for statistic in probe.statistics:
            slot = slots.get((probe.name, statistic.terms))
            if slot is not None and not statistic.dims:
                (terms,) = gather([slot], statistic.terms, fetched)
                plain.setdefault(statistic.name, float(statistic.of(terms)))
                plain.setdefault("count", float(statistic.terms.named(terms).get("count", np.nan)))
    return plain


def _norm(slots: TermSlots, fetched: Fetched) -> float:
    """Euclidean norm from whichever terms hold the squares."""
    for (_, terms), slot in slots.items():
        (values,) = gather([slot], terms, fetched)
        columns = terms.named(values)
        if "squares" in columns:
            return float(np.sqrt(columns["squares"]))
        if "max_abs" in columns and "m2" in columns:
            return float(NORM.of(values))
    return float("nan")
