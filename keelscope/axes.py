"""The site axis of each group of statistics: laid when the first recorded step is complete, longer as a model grows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from keelscope.calls import StepRecord
from keelscope.distributed import Ranks
from keelscope.layout import AxisOrder, by_group
from keelscope.probe import Axis, Probe, Tap, fits_site, group_of
from keelscope.sites import SitePlan

__all__ = ["Axes", "lay_axes", "longer"]

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
    axes = {group: order.of(plan, several) for group, several in groups.items()}
    left_out = quiet(groups, order.modules.size)
    axes |= {group: axes[group][[i not in sites for i in axes[group]]] for group, sites in left_out.items()}
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


def longer(axes: Axes, plan: SitePlan, probes: Sequence[Probe], modules: int, parameters: int) -> Axes:
    """The same axes with the sites that a plan has got since, behind those there were.

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
            new = [
                i for i, w in enumerate(plan.parameters) if i >= parameters and any(p.fits(w.owner) for p in several)
            ]
        elif tap.of_module and tap is not Tap.ATTENTION:
            new = [
                i
                for i, w in enumerate(plan.modules)
                if i >= modules and any(fits_site(probe, w.module, w.site.role) for probe in several)
            ]
        else:
            continue
        grown[group] = np.array([*axes[group], *new], dtype=np.intp)
    return grown


def _can_record(probe: Probe, ranks: Ranks) -> bool:
    """Whether anything of the probe can be recorded on this rank."""
    return any(ranks.records(statistic, probe.tap) for statistic in probe.statistics)
