"""The layout of a run that several parts make up: every group, site, statistic and scalar that one of them has.

Order is that of the first part that has it. Where two parts describe one statistic with different axes, the first
counts and the other's rows of it are as if it lacked the statistic. Used by `merged`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from keelscope.store.names import GRADIENTS, SUBLAYERS
from keelscope.store.schema import (
    CoverageEntry,
    GroupSpec,
    RunInfo,
    RunLayout,
    Site,
    Stack,
    StatisticSpec,
    SublayerInfo,
)

__all__ = ["place_sites", "same_axes", "unite"]


def unite(layouts: Sequence[RunLayout]) -> RunLayout:
    """One layout for all parts.

    Args:
        layouts: at least one, in the order of the run.

    Returns:
        The union; what is known about the run as a whole is taken from the first.
    """
    if len(layouts) == 1:
        return layouts[0]
    found: dict[str, list[GroupSpec]] = {}
    for layout in layouts:
        for group in layout.groups:
            found.setdefault(group.name, []).append(group)
    groups = tuple(map(_unite_groups, found.values()))
    return replace(
        layouts[0],
        info=_unite_info(layouts, groups),
        groups=groups,
        scalars=tuple(dict.fromkeys(name for layout in layouts for name in layout.scalars)),
        coverage=_unite_coverage(layouts),
    )


def same_axes(one: StatisticSpec, other: StatisticSpec) -> bool:
    """Whether values of two parts belong into one array.

    Args:
        one: a statistic.
        other: that of the same name in another part.

    Returns:
        True if their extra axes and coordinates agree.
    """
    return one.dims == other.dims and all(tuple(one.coords[d]) == tuple(other.coords[d]) for d in one.dims)


def place_sites(own: Sequence[Site], whole: Sequence[Site]) -> NDArray[np.int64] | None:
    """Where the sites of a part lie on the united axis.

    Args:
        own: site axis of the part.
        whole: united site axis.

    Returns:
        ``[own site]`` index on the united axis, or None if both axes are the same.
    """
    places = {key: index for index, key in enumerate(_keys(whole))}
    found = np.array([places[key] for key in _keys(own)], np.int64)
    return None if np.array_equal(found, np.arange(len(whole))) else found


def _unite_groups(groups: Sequence[GroupSpec]) -> GroupSpec:
    first = groups[0]
    statistics: dict[str, StatisticSpec] = {}
    for group in groups:
        for spec in group.statistics:
            statistics.setdefault(spec.name, spec)
    return replace(first, statistics=_without_clashes(statistics), sites=_unite_sites(g.sites for g in groups))


def _without_clashes(statistics: dict[str, StatisticSpec]) -> tuple[StatisticSpec, ...]:
    """Those of which each axis has one set of coordinates, as a file needs it; the later of two that clash goes."""
    axes: dict[str, tuple[float, ...]] = {}

    def fits(spec: StatisticSpec) -> bool:
        return all(axes.setdefault(dim, tuple(spec.coords[dim])) == tuple(spec.coords[dim]) for dim in spec.dims)

    return tuple(spec for spec in statistics.values() if fits(spec))


def _unite_sites(axes: Iterable[Sequence[Site]]) -> tuple[Site, ...]:
    found: dict[tuple[str, int], Site] = {}
    different = list({id(sites): sites for sites in axes}.values())
    if len(different) == 1:
        return tuple(different[0])
    for sites in different:
        for key, site in zip(_keys(sites), sites, strict=True):
            found.setdefault(key, site)
    return tuple(found.values())


def _keys(sites: Sequence[Site]) -> list[tuple[str, int]]:
    """Path, and how often it came before, should an axis hold one twice."""
    seen: Counter[str] = Counter()
    keys = []
    for site in sites:
        keys.append((site.path, seen[site.path]))
        seen[site.path] += 1
    return keys


def _unite_info(layouts: Sequence[RunLayout], groups: Sequence[GroupSpec]) -> RunInfo:
    """That of the first part, with the stages of the model that other ranks have."""
    first = layouts[0].info
    sizes = [sum(s.numel for s in group.sites) for group in groups if group.name == GRADIENTS]
    return replace(
        first,
        stacks=_unite_stacks([layout.info.stacks for layout in layouts]),
        sublayers=_unite_sublayers(layouts),
        n_parameters=max([first.n_parameters, *sizes]),
    )


def _unite_stacks(several: Iterable[Sequence[Stack]]) -> tuple[Stack, ...]:
    """Each stack as far as it reaches on any rank; the longest is the main one."""
    found: dict[tuple[str, str], Stack] = {}
    for stack in (stack for stacks in several for stack in stacks):
        known = found.setdefault((stack.path, stack.kind), stack)
        longest = max(known, stack, key=lambda one: one.length)
        chained = known.chained or stack.chained
        found[stack.path, stack.kind] = replace(longest, sublayers=known.sublayers or stack.sublayers, chained=chained)
    main = max(found.values(), key=lambda one: (one.length, one.main), default=None)
    return tuple(replace(stack, main=stack is main) for stack in found.values())


def _unite_sublayers(layouts: Sequence[RunLayout]) -> tuple[SublayerInfo, ...]:
    """One record for each site of the group of sub-layers, in the same order; by what they name, where none is kept."""
    found: dict[tuple[str, int], SublayerInfo] = {}
    for layout in layouts:
        sites = next((group.sites for group in layout.groups if group.name == SUBLAYERS), ())
        named = [Site(f"{info.site} {info.branch}", "") for info in layout.info.sublayers]
        keys = _keys(sites if len(sites) == len(named) else named)
        for key, info in zip(keys, layout.info.sublayers, strict=True):
            found.setdefault(key, info)
    return tuple(found.values())


def _unite_coverage(layouts: Sequence[RunLayout]) -> tuple[CoverageEntry, ...]:
    found: dict[tuple[str, str], CoverageEntry] = {}
    for entry in (entry for layout in layouts for entry in layout.coverage):
        before = found.get((entry.path, entry.what))
        if before is None or before.status != "observed":
            found[entry.path, entry.what] = entry
    return tuple(found.values())
