"""The layers of a run, the same for every panel: the depth axis of the diagnosis, mapped onto the sites of a group.

A click on a layer in one panel therefore means the same layer in every other, and in the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keelscope.diagnosis.axis import depth_axis, row_owner
from keelscope_dashboards.levels import LayerAxis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keelscope.store.reader import Run
    from keelscope.store.schema import Site

__all__ = ["run_axis"]


def run_axis(run: Run, group: str) -> LayerAxis:
    """The layers of a run with the sites of one group that belong to each.

    Args:
        run: any run.
        group: name of a group that it holds.

    Returns:
        The axis, the input side first; a layer that the group does not cover has no members.
    """
    chain = depth_axis(run)
    rows = {site.path: i for i, site in enumerate(chain.sites)}
    members: list[list[int]] = [[] for _ in chain.sites]
    for i, site in enumerate(run.groups[group].sites):
        row = _row_of(site, rows)
        if row >= 0:
            members[row].append(i)
    labels, types = zip(*((site.path, site.kind) for site in chain.sites), strict=True) if chain.sites else ((), ())
    return LayerAxis(labels, types, _frozen(members), chain.unit, tuple(int(depth) for depth in chain.depth))


def _row_of(site: Site, rows: dict[str, int]) -> int:
    return row_owner(site.path, rows) if site.role == "parameter" else rows.get(site.path, -1)


def _frozen(members: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(indices) for indices in members)
