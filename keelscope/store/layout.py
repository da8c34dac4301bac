"""Checks that a layout can be stored, once, before anything is written; the shape of every statistic.

`rows.RowPacker` calls `checked` for both writers, so that a run in memory accepts exactly what a run file accepts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from keelscope.errors import UsageError
from keelscope.store.names import COVERAGE, STATUS, check_name
from keelscope.store.schema import SCALARS, GroupSpec, RunLayout, StatisticSpec

__all__ = ["check_wider", "checked", "extra_axes", "row_shape"]

_MAX_EXTRA_AXES = 2


def checked(layout: RunLayout) -> RunLayout:
    """The layout as it will be stored: groups without sites or statistics and repeated scalar names are left out.

    Args:
        layout: what is to be recorded.

    Returns:
        A layout that every writer accepts.

    Raises:
        UsageError: if a name cannot be used, is used twice, or an axis has no or contradicting coordinates.
    """
    groups = tuple(group for group in layout.groups if group.sites and group.statistics)
    _check_distinct([group.name for group in groups], "group")
    for group in groups:
        check_name(group.name, "A group")
        if group.name in {SCALARS, COVERAGE, STATUS, f"{STATUS}_field"}:
            raise UsageError(f"A group cannot be called {group.name!r}: the run file uses that name itself.")
        _check_group(group)
    return replace(layout, groups=groups, scalars=tuple(dict.fromkeys(layout.scalars)))


def check_wider(before: RunLayout, after: RunLayout) -> None:
    """Refuse a layout in which something of an earlier one is missing or has another place.

    Args:
        before: the layout so far, as `checked` returned it.
        after: the layout to come, likewise.

    Raises:
        UsageError: if a scalar, group, statistic or site is gone; new sites come after those there were.
    """
    groups = {group.name: group for group in after.groups}
    missing = [f"scalar {name!r}" for name in before.scalars if name not in after.scalars]
    for old in before.groups:
        new = groups.get(old.name)
        if new is None:
            missing.append(f"group {old.name!r}")
        else:
            missing += [f"site {site.path!r}" for site in old.sites[:1] if new.sites[: len(old.sites)] != old.sites]
            missing += [f"statistic {old.name}/{spec.name}" for spec in old.statistics if spec not in new.statistics]
    if missing:
        raise UsageError(f"The new layout lacks {missing[0]} or has it in another place; a run's layout only grows.")


def row_shape(group: GroupSpec, statistic: StatisticSpec) -> tuple[int, ...]:
    """Shape ``[site, ...]`` of one row of a statistic.

    Args:
        group: the group it belongs to.
        statistic: one of its statistics.

    Returns:
        Number of sites, then the size of each extra axis.
    """
    return (len(group.sites), *(len(statistic.coords[dim]) for dim in statistic.dims))


def extra_axes(group: GroupSpec) -> dict[str, tuple[float, ...]]:
    """Coordinates of every axis after ``[step, site]`` that occurs in a group.

    Args:
        group: the group.

    Returns:
        Axis name to coordinate values.
    """
    return {dim: tuple(spec.coords[dim]) for spec in group.statistics for dim in spec.dims}


def _check_group(group: GroupSpec) -> None:
    names = [spec.name for spec in group.statistics]
    _check_distinct(names, f"statistic of {group.name!r}")
    for spec in group.statistics:
        check_name(spec.name, f"A statistic of {group.name!r}")
        _check_axes(group.name, spec)
    axes = extra_axes(group)
    _check_distinct([*names, *axes], f"statistic or axis of {group.name!r}")
    for spec in group.statistics:
        for dim in spec.dims:
            if tuple(spec.coords[dim]) != axes[dim]:
                raise UsageError(f"Axis {dim!r} of {group.name!r} has two sets of coordinates; rename one of them.")


def _check_axes(group: str, spec: StatisticSpec) -> None:
    missing = [dim for dim in spec.dims if not _size(spec.coords, dim)]
    if missing or len(spec.dims) > _MAX_EXTRA_AXES or len(set(spec.dims)) < len(spec.dims):
        raise UsageError(
            f"{group}/{spec.name} has extra axes {spec.dims}: at most {_MAX_EXTRA_AXES} distinct ones can be stored, "
            f"each with its coordinate values in coords{f' (missing: {missing[0]!r})' if missing else ''}."
        )
    for dim in spec.dims:
        check_name(dim, f"An axis of {group}/{spec.name}")


def _size(coords: Mapping[str, tuple[float, ...]], dim: str) -> int:
    return len(coords.get(dim, ()))


def _check_distinct(names: list[str], what: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise UsageError(f"Two things are called {name!r}; every {what} needs a name of its own.")
