"""The layers of a run, the same for every panel: the depth axis of the diagnosis, mapped onto the sites of a group.

A click on a layer in one panel therefore means the same layer in every other, and in the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from keelscope.diagnosis.axis import depth_axis, row_owner
from keelscope_dashboards.levels import LayerAxis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from keelscope.diagnosis.axis import DepthAxis
    from keelscope.store.reader import Run
    from keelscope.store.schema import Site, StatisticSpec

__all__ = ["inner_names", "parts_of", "run_axis", "unfolded"]


def parts_of(axis: LayerAxis) -> tuple[str, ...]:
    """The kinds of sites that lie at every depth of an axis, by the last name in their path.

    Args:
        axis: of a group.

    Returns:
        Nothing where no two entries lie at one depth, or where the names say nothing.
    """
    if len(set(axis.depths)) == len(axis.depths):
        return ()
    names = [label.rpartition(".")[2] for label in axis.labels]
    kept = tuple(name for name in dict.fromkeys(names) if names.count(name) > 1)
    return kept if len(kept) > 1 else ()


def run_axis(run: Run, key: str, part: str = "") -> LayerAxis:
    """The layers of a run with the sites of one series that belong to each.

    Args:
        run: any run.
        key: ``group/statistic`` of a group that it holds.
        part: of a group with its own axis, only the sites of that last name; all if empty.

    Returns:
        The axis, the input side first; a layer that the group does not cover has no members. A group whose sites are
        none of the layers (norms, sub-layers, gates) keeps its own axis: every site at the depth it lies at. A series
        with a further axis (heads, quantiles) has one entry for each of its values, as `unfolded` lays them out.
    """
    group, _, name = key.partition("/")
    spec = next((spec for spec in run.groups[group].statistics if spec.name == name), None)
    if spec is not None and spec.dims:
        return _inner_axis(_site_axis(run, group, ""), inner_names(spec), part)
    return _site_axis(run, group, part)


def inner_names(spec: StatisticSpec) -> tuple[str, ...]:
    """What lies at every site of a statistic with one further axis: ``"head 0"``, ``"quantile 10 %"``.

    Args:
        spec: of the statistic.

    Returns:
        One name per value of the axis; empty where there is none, or more than one.
    """
    if len(spec.dims) != 1:
        return ()
    dim, values = spec.dims[0], spec.coords.get(spec.dims[0], ())
    shares = any(value % 1 for value in values) and all(0 <= value <= 1 for value in values)
    return tuple(f"{dim} {100 * value:g} %" if shares else f"{dim} {value:g}" for value in values)


def unfolded(
    values: NDArray[np.floating], observed: NDArray[np.bool_]
) -> tuple[NDArray[np.floating], NDArray[np.bool_]]:
    """A series with a further axis as if each of its values were a site of its own.

    Args:
        values: ``[step, site, ...]``.
        observed: ``[step, site]``.

    Returns:
        Both as ``[step, entry]``.

    Example:
        >>> unfolded(np.zeros((5, 3, 4)), np.ones((5, 3), dtype=bool))[1].shape
        (5, 12)
    """
    steps, sites = values.shape[:2]
    inner = int(np.prod(values.shape[2:]))
    return values.reshape(steps, sites * inner), np.repeat(observed, inner, axis=1)


def _inner_axis(sites: LayerAxis, names: Sequence[str], part: str) -> LayerAxis:
    """Every layer once for each name."""
    depths = sites.depths or tuple(range(1, len(sites) + 1))
    kept = [
        (f"{sites.labels[i]}.{name}", sites.types[i], (member * len(names) + k,), depths[i])
        for i, members in enumerate(sites.members)
        for member in members
        for k, name in enumerate(names)
        if part in {"", name}
    ]
    labels, types, members, places = zip(*kept, strict=True) if kept else ((), (), (), ())
    return LayerAxis(labels, types, members, sites.unit, places)


def _site_axis(run: Run, group: str, part: str) -> LayerAxis:
    chain = depth_axis(run)
    rows = {site.path: i for i, site in enumerate(chain.sites)}
    members: list[list[int]] = [[] for _ in chain.sites]
    for i, site in enumerate(run.groups[group].sites):
        row = _row_of(site, rows)
        if row >= 0:
            members[row].append(i)
    if run.groups[group].sites and not any(members):
        return _own_axis(run.groups[group].sites, chain, part)
    labels, types = zip(*((site.path, site.kind) for site in chain.sites), strict=True) if chain.sites else ((), ())
    return LayerAxis(labels, types, _frozen(members), chain.unit, tuple(int(depth) for depth in chain.depth))


def _own_axis(sites: Sequence[Site], chain: DepthAxis, part: str) -> LayerAxis:
    """One entry per site; a site after the stack lies one deeper than what comes before it."""
    depths, depth = [], 0
    for i, site in enumerate(sites):
        inside = chain.stack is not None and site.stack == chain.stack.path and site.position >= 0
        if site.role == "sublayer":
            depth = i + 1
        elif inside or chain.stack is None:
            depth = max(depth, (site.position + 1) * chain.per_layer) if inside else i + 1
        depths.append(depth if inside or site.role == "sublayer" or chain.stack is None or not depth else depth + 1)
    kept = [i for i, site in enumerate(sites) if part in {"", site.path.rpartition(".")[2]}]
    labels, kinds = tuple(sites[i].path for i in kept), tuple(sites[i].kind for i in kept)
    return LayerAxis(labels, kinds, tuple((i,) for i in kept), chain.unit, tuple(depths[i] for i in kept))


def _row_of(site: Site, rows: dict[str, int]) -> int:
    return row_owner(site.path, rows) if site.role == "parameter" else rows.get(site.path, -1)


def _frozen(members: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(indices) for indices in members)
