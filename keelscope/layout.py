"""The layout of a run file, drawn up when the first recorded step is complete.

Joins what `keelscope.sites` knows about the model with the order in which its modules ran.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from keelscope.distributed import Ranks
from keelscope.probe import Axis, Probe, Tap, fits_site, group_of
from keelscope.sites import SitePlan, WatchedModule
from keelscope.stacks import class_name
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, StatisticSpec

__all__ = ["AxisOrder", "by_group", "draw_layout", "fitted", "trimmed", "wider"]

_FOUND = frozenset({Axis.SUBLAYER, Axis.GATE})
"""Axes that are no part of the module tree."""
_SCALE = "as backward produced it; divided by the loss scale when a GradScaler of the watched optimizer is in use"
_PROVENANCE: Mapping[Tap, Mapping[str, str]] = {
    Tap.OUTPUT_GRADIENT: {"scale": _SCALE, "merge": "over calls and micro-batches"},
    Tap.JACOBIAN: {"merge": "over calls and micro-batches", "when": "during the backward pass, on its own graph"},
    Tap.PARAMETER_GRADIENT: {"scale": _SCALE, "clip": "before clipping", "merge": "accumulated over the whole step"},
    Tap.RESIDUAL_SUM: {"merge": "first micro-batch"},
    Tap.RESIDUAL_GRADIENTS: {"scale": _SCALE, "merge": "first backward pass of the first micro-batch"},
    Tap.GATE: {"when": "before the optimizer step"},
    Tap.GATE_GRADIENT: {"scale": _SCALE, "clip": "before clipping", "merge": "accumulated over the whole step"},
    Tap.ATTENTION: {"queries": "at most 64 of each sequence, evenly spaced", "merge": "over calls and micro-batches"},
    Tap.PARAMETER: {"when": "before the optimizer step"},
    Tap.STEP_GRADIENT: {"clipped": "as the optimizer got it"},
    Tap.UPDATE: {"when": "after minus before the optimizer step"},
}


class AxisOrder:
    """Places of modules and parameters on their site axes: in the order they first ran, the others after them.

    Args:
        plan: the sites in registration order.
        ran: indices into ``plan.modules``, in the order of their first call.
        found: length of the axes that are no part of the plan.
        attending: indices of the modules that attention was seen in, the only sites of `Tap.ATTENTION`.
    """

    def __init__(
        self,
        plan: SitePlan,
        ran: Sequence[int],
        found: Mapping[Axis, int] | None = None,
        attending: Container[int] = (),
    ) -> None:
        self.found = found or {}
        seen = list(dict.fromkeys(ran))
        self._attending = attending
        self.modules: NDArray[np.intp] = _completed(seen, len(plan.modules))
        rank = {id(plan.modules[i].module): place for place, i in enumerate(seen)}
        last = len(seen)
        keys = []
        for i, watched in enumerate(plan.parameters):
            last = rank.get(id(watched.owner), last if i else len(seen))
            keys.append((last, i))
        self.parameters: NDArray[np.intp] = np.array([i for _, i in sorted(keys)], dtype=np.intp)

    def of(self, plan: SitePlan, probes: Sequence[Probe]) -> NDArray[np.intp]:
        """Registration indices in axis order of the sites any of the probes (of one group) fits."""
        if probes[0].tap.axis in _FOUND:
            return np.arange(self.found.get(probes[0].tap.axis, 0))
        if probes[0].tap.of_module:
            modules = enumerate(plan.modules)
            fitting = [any(self._shows(probe, watched, i) for probe in probes) for i, watched in modules]
            return _kept(self.modules, fitting)
        fitting = [any(probe.fits(watched.owner) for probe in probes) for watched in plan.parameters]
        return _kept(self.parameters, fitting)

    def _shows(self, probe: Probe, watched: WatchedModule, place: int) -> bool:
        fits = fits_site(probe, watched.module, watched.site.role)
        return fits and (probe.tap is not Tap.ATTENTION or place in self._attending)


def _kept(order: NDArray[np.intp], fitting: list[bool]) -> NDArray[np.intp]:
    return np.array([i for i in order if fitting[i]], dtype=np.intp)


def by_group(probes: Sequence[Probe]) -> dict[str, list[Probe]]:
    """Probes by the group they write, in order."""
    groups: dict[str, list[Probe]] = {}
    for probe in probes:
        groups.setdefault(group_of(probe), []).append(probe)
    return groups


def _completed(first: list[int], length: int) -> NDArray[np.intp]:
    rest = sorted(set(range(length)) - set(first))
    return np.array([*first, *rest], dtype=np.intp)


def draw_layout(  # noqa: PLR0913 - what a layout is drawn from
    model: nn.Module,
    plan: SitePlan,
    probes: Sequence[Probe],
    axes: Mapping[str, NDArray[np.intp]],
    found: Mapping[Axis, Sequence[Site]],
    *,
    title: str | Path | None,
    config: Mapping[str, object],
    ranks: Ranks,
) -> RunLayout:
    """Everything but the scalars and the coverage of a run's layout.

    Args:
        model: the watched model.
        plan: its sites.
        probes: what is recorded.
        axes: group -> registration indices along its site axis.
        found: the axes that are no part of the plan.
        title: run name or path; its stem is kept, nothing of the folder.
        config: JSON values to store.
        ranks: what this rank holds of the model.

    Returns:
        The layout, with neither scalars nor coverage.
    """
    first = next((p for p in model.parameters()), None)
    info = RunInfo(
        title=Path(title).stem if title else class_name(model),
        run_id=str(uuid.uuid4()),
        created_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        model_class=class_name(model),
        n_parameters=sum(watched.site.numel for watched in plan.parameters),
        device=first.device.type if first is not None else "",
        training_library=f"torch {torch.__version__}",
        seed=_storable(torch.initial_seed()),
        stacks=plan.stacks,
        config=dict(config),
    )
    groups = [(name, several) for name, several in by_group(probes).items() if name in axes]
    drawn = tuple(_group(name, several, _sites(plan, found, several, axes[name]), ranks) for name, several in groups)
    return RunLayout(info, drawn, part=ranks.part())


def trimmed(layout: RunLayout, extents: Mapping[str, Mapping[str, int]]) -> RunLayout:
    """A layout whose axes are as long as the first row said, see `Statistic.extent`.

    Args:
        layout: the layout.
        extents: group -> axis -> length.

    Returns:
        The same with fewer coordinates.
    """

    def cut(spec: StatisticSpec, lengths: Mapping[str, int]) -> StatisticSpec:
        return replace(spec, coords={dim: spec.coords[dim][: lengths.get(dim)] for dim in spec.dims})

    groups = [(group, extents.get(group.name, {})) for group in layout.groups]
    cuts = [replace(group, statistics=tuple(cut(s, lengths) for s in group.statistics)) for group, lengths in groups]
    return replace(layout, groups=tuple(cuts))


def wider(before: RunLayout, now: RunLayout) -> RunLayout:
    """The layout of a run whose model has got more sites.

    Args:
        before: the layout so far.
        now: one drawn from the model as it is now.

    Returns:
        The first with the sites that only the second has, and the coverage of that.
    """
    groups = {group.name: group for group in now.groups}
    grown = tuple(
        replace(group, sites=(*group.sites, *groups[group.name].sites[len(group.sites) :]))
        for group in before.groups
        if group.name in groups
    )
    return replace(before, groups=grown, coverage=now.coverage)


def fitted(row: Row, layout: RunLayout) -> Row:
    """A row cut to the sites of a layout, which may not have grown with the model.

    Args:
        row: a row with at least those sites.
        layout: the layout.

    Returns:
        The row.
    """
    sites = {group.name: len(group.sites) for group in layout.groups}
    values = {g: {name: v[: sites[g]] for name, v in found.items()} for g, found in row.values.items()}
    return replace(row, values=values, observed={g: seen[: sites[g]] for g, seen in row.observed.items()})


def _storable(seed: int) -> int:
    """Seeds are unsigned in torch; those beyond int64 were drawn, not chosen."""
    return seed if seed < 1 << 63 else -1


def _sites(
    plan: SitePlan, found: Mapping[Axis, Sequence[Site]], probes: Sequence[Probe], axis: NDArray[np.intp]
) -> tuple[Site, ...]:
    if probes[0].tap.axis in _FOUND:
        return tuple(found.get(probes[0].tap.axis, ()))
    watched = plan.modules if probes[0].tap.of_module else plan.parameters
    return tuple(watched[i].site for i in axis)


def _group(name: str, probes: Sequence[Probe], sites: tuple[Site, ...], ranks: Ranks) -> GroupSpec:
    package = type(probes[0]).__module__.partition(".")[0]
    provenance = {key: text for probe in probes for key, text in _PROVENANCE.get(probe.tap, {}).items()}
    for probe in probes:
        provenance |= ranks.provenance(probe.tap)
    return GroupSpec(
        name,
        tuple(
            replace(statistic.spec(), across_ranks=ranks.combination(statistic, probe.tap))
            for probe in probes
            for statistic in probe.statistics
            if ranks.records(statistic, probe.tap)
        ),
        sites,
        probe=f"{package}:{name}",
        probe_version=max(probe.version for probe in probes),
        provenance=provenance,
    )
