"""The residual sub-layers of a run: its axis, what the file says of each, and how many a stack has per entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from keelscope.sites import SitePlan
from keelscope.store.columns import Columns
from keelscope.store.schema import Site, Stack, SublayerInfo
from keelscope.topology import Sublayer, Topology
from keelscope.topology.gates import ResidualGate, paths_by_sublayer

__all__ = ["count_sublayers", "describe", "sublayer_sites"]


def describe(topology: Topology | None, gates: Sequence[ResidualGate] = ()) -> Columns[SublayerInfo]:
    """A topology as it is stored in a run file.

    Args:
        topology: what was read, or None.
        gates: the gates found in it.

    Returns:
        One entry per sub-layer, in execution order.
    """
    sublayers = topology.sublayers if topology is not None else ()
    found = paths_by_sublayer(gates)
    return Columns(SublayerInfo, (_describe(sublayer, found.get(sublayer.index, ())) for sublayer in sublayers))


def _describe(sublayer: Sublayer, gates: tuple[str, ...]) -> SublayerInfo:
    return SublayerInfo(
        form=sublayer.form,
        schemes=sublayer.schemes,
        site=sublayer.site or "",
        branch=sublayer.branch or "",
        norm_before=sublayer.norm_before or "",
        norm_after=sublayer.norm_after or "",
        alpha=sublayer.alpha.value,
        beta=sublayer.beta.value,
        gates=gates,
        stream=sublayer.stream,
    )


def sublayer_sites(topology: Topology | None, plan: SitePlan) -> tuple[Site, ...]:
    """The axis of residual sub-layers.

    Args:
        topology: what was read, or None.
        plan: the sites, which know where each path lies.

    Returns:
        One site per sub-layer in execution order, named after its branch; names that occur twice get the index.
    """
    sublayers = topology.sublayers if topology is not None else ()
    names = [sublayer.branch or sublayer.site or "sublayer" for sublayer in sublayers]
    counts = Counter(names)
    sites = []
    for name, sublayer in zip(names, sublayers, strict=True):
        stack, position = plan.place(name)
        path = name if counts[name] == 1 else f"{name}@{sublayer.index}"
        sites.append(Site(path, sublayer.form, "sublayer", stack, position))
    return tuple(sites)


def count_sublayers(stacks: Sequence[Stack], topology: Topology | None, plan: SitePlan) -> tuple[Stack, ...]:
    """Stacks with their number of sub-layers per entry, where each entry holds the same number; chained or not.

    The first entry may hold fewer: where what enters it needs no gradient, no shortcut can be read there. What the
    block class declares goes before what the graph shows.

    Args:
        stacks: as found in the module tree.
        topology: what was read, or None.
        plan: the sites, which know where each path lies.

    Returns:
        The stacks.
    """
    found: dict[tuple[str, int], int] = {}
    for sublayer in topology.sublayers if topology is not None else ():
        paths = [path for path in (*sublayer.branch_sites, sublayer.site) if path]
        inside = next((place for path in paths if (place := plan.place(path))[0]), None)
        if inside is not None:
            found[inside] = found.get(inside, 0) + 1
    places = sorted(set(plan.entries.values()))
    following = Counter(plan.place(path)[0] for path in (topology.following if topology is not None else ()))
    counted = (_counted(stack, [found.get(place, 0) for place in places if place[0] == stack.path]) for stack in stacks)
    return tuple(replace(stack, chained=2 * following[stack.path] >= stack.length) for stack in counted)


def _counted(stack: Stack, counts: Sequence[int]) -> Stack:
    """With the number of all entries, or of all after the first where that holds fewer."""
    numbers = set(counts[1:] or counts)
    alike = len(numbers) == 1 and min(counts) >= counts[0]
    return replace(stack, sublayers=numbers.pop()) if not stack.sublayers and alike else stack
