"""The site axis of each group of statistics: laid when the first recorded step is complete, longer as a model grows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from keelscope.calls import StepRecord
from keelscope.changes import Gone
from keelscope.containment import warn_once
from keelscope.distributed import Ranks
from keelscope.layout import AxisOrder, by_group
from keelscope.probe import Axis, Probe, Tap, fits_site, group_of
from keelscope.sites import SitePlan
from keelscope.store.schema import Site

__all__ = ["Axes", "lay_axes", "longer", "usable"]

_log = logging.getLogger(__name__)

Axes = dict[str, NDArray[np.intp]]
"""Group -> registration indices along its site axis."""
Quiet = Callable[[Mapping[str, list[Probe]], int], Mapping[str, Container[int]]]
"""Groups and number of sites -> the sites of a group that are left out."""


def lay_axes(
    plan: SitePlan, probes: Sequence[Probe], step: StepRecord, found: Mapping[Axis, int], ranks: Ranks, quiet: Quiet
) -> tuple[Axes, tuple[Probe, ...]]:
    """The site axis of every group that has sites.

    Args:
        plan: the sites.
        probes: what is recorded.
        step: the first recorded step.
        found: length of the axes that are no part of the plan.
        ranks: what this rank holds of the model.
        quiet: which sites have nothing to say.

    Returns:
        The axes, and the probes that are left.
    """
    attending = {call.site for call in step.calls if call.attention}
    order = AxisOrder(plan, [call.site for call in step.calls], found, attending)
    groups = by_group(probes)
    gone = _gone(plan)
    axes = {
        group: _without(order.of(plan, several), gone.get(several[0].tap.axis)) for group, several in groups.items()
    }
    left_out = quiet(groups, order.modules.size)
    axes |= {group: _without(axes[group], sites) for group, sites in left_out.items()}
    empty = {
        group
        for group, several in groups.items()
        if found.get(several[0].tap.axis) == 0 or (group in left_out and not len(axes[group]))
    }
    for group in empty:
        _log.info("%s are not recorded: none was found in the first recorded step", group)
    kept = tuple(probe for probe in probes if group_of(probe) not in empty and _can_record(probe, ranks))
    names = {group_of(probe) for probe in kept}
    return {group: axis for group, axis in axes.items() if group in names}, kept


def _without(axis: NDArray[np.intp], sites: Container[int] | None) -> NDArray[np.intp]:
    return axis if sites is None else axis[[i not in sites for i in axis]]


def _gone(plan: SitePlan) -> dict[Axis, Container[int]]:
    """What was taken out of the model between the call of `watch` and the first recorded step."""
    return {
        Axis.MODULE: {i for i, watched in enumerate(plan.modules) if isinstance(watched.module, Gone)},
        Axis.PARAMETER: {i for i, watched in enumerate(plan.parameters) if isinstance(watched.owner, Gone)},
    }


def longer(axes: Axes, plan: SitePlan, probes: Sequence[Probe], modules: int, parameters: int) -> Axes:
    """The same axes, with what a plan has got since: in the place of its path, or behind all there were.

    Args:
        axes: as they were.
        plan: the plan, which only grows.
        probes: what is recorded.
        modules: how many modules the plan had.
        parameters: how many parameters.

    Returns:
        The axes; those of attention, sub-layers and gates are as they were.
    """
    grown = dict(axes)
    for group, several in by_group(probes).items():
        tap = several[0].tap
        if tap.axis is Axis.PARAMETER:
            owners = [(w.site, [p for p in several if p.fits(w.owner)]) for w in plan.parameters]
            grown[group] = _longer(axes[group], owners, parameters)
        elif tap.of_module and tap is not Tap.ATTENTION:
            fitting = [(w.site, [p for p in several if fits_site(p, w.module, w.site.role)]) for w in plan.modules]
            grown[group] = _longer(axes[group], fitting, modules)
    return grown


def _longer(axis: NDArray[np.intp], sites: Sequence[tuple[Site, list[Probe]]], known: int) -> NDArray[np.intp]:
    places = {sites[i][0].path: place for place, i in enumerate(axis)}
    found = [*axis]
    for i in (i for i in range(known, len(sites)) if sites[i][1]):
        place = places.get(sites[i][0].path)
        if place is None:
            found.append(i)
        else:
            found[place] = i
    return np.array(found, dtype=np.intp)


def usable(probes: Sequence[Probe], plan: SitePlan, owner: object) -> tuple[Probe, ...]:
    """Those probes that can say what they fit; one that fails is left out, with a warning.

    Args:
        probes: what was asked for.
        plan: the sites.
        owner: keeps what was said, see `keelscope.containment.warn_once`.

    Returns:
        The others.
    """
    modules = [w.module for w in plan.modules] + [w.owner for w in plan.parameters]
    return tuple(probe for probe in probes if _usable(probe, modules, owner))


def _usable(probe: Probe, modules: Sequence[nn.Module], owner: object) -> bool:
    try:
        for module in modules:
            probe.fits(module)
    except Exception as error:
        warn_once(owner, error, probe.name)
        return False
    return True


def _can_record(probe: Probe, ranks: Ranks) -> bool:
    """Whether anything of the probe can be recorded on this rank."""
    return any(ranks.records(statistic, probe.tap) for statistic in probe.statistics)
