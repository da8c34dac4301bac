"""The layers of a run, the same for every panel: the depth axis of the diagnosis, mapped onto the sites of a group.

A click on a layer in one panel therefore means the same layer in every other, and in the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keelscope.diagnosis.axis import depth_axis, row_owner
from keelscope_dashboards.levels import LayerAxis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope.diagnosis.axis import DepthAxis
    from keelscope.store.reader import Run
    from keelscope.store.schema import Site

__all__ = ["parts_of", "run_axis"]


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


def run_axis(run: Run, group: str, part: str = "") -> LayerAxis:
    """The layers of a run with the sites of one group that belong to each.

    Args:
        run: any run.
        group: name of a group that it holds.
        part: of a group with its own axis, only the sites of that last name; all if empty.

    Returns:
        The axis, the input side first; a layer that the group does not cover has no members. A group whose sites are
        none of the layers (norms, sub-layers, gates) keeps its own axis: every site at the depth it lies at.
    """
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
