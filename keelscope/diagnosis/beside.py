"""Further stacks of a model that are chains of their own: the encoder beside a longer decoder, the other tower.

Depth is counted along the main stack (`axis`). Each stack that is found here is judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keelscope.analysis.profile import MIN_LAYERS
from keelscope.diagnosis.axis import DepthAxis, entries_of

if TYPE_CHECKING:
    from keelscope.store.reader import Run
    from keelscope.store.schema import Site

__all__ = ["axes_beside"]


def axes_beside(run: Run, main: DepthAxis, rows: Sequence[Site]) -> tuple[DepthAxis, ...]:
    """The depth axes of the other stacks that are worth a verdict, the longest first.

    A stack is one if it has at least 4 entries, if most of them were seen to take what the one before gave (heads and
    projections beside each other do not), and if it does not take turns with a stack that is judged already, as the
    norms do that a model keeps in a list of their own. Two residual streams that take turns are two chains.

    Args:
        run: any run.
        main: the axis of its main stack, or the chain of modules in its place.
        rows: the rows of its layer table, in execution order.

    Returns:
        Axes that share no layer with the main one.
    """
    taken = [main.sites]
    found: list[DepthAxis] = []
    for stack in sorted(run.info.stacks, key=lambda one: -one.length):
        sites = tuple(sorted(entries_of(rows, stack, run.info.stacks), key=lambda site: site.position))
        if len(sites) < MIN_LAYERS or not stack.chained or any(_is_one_chain(run, rows, sites, t) for t in taken):
            continue
        taken.append(sites)
        found.append(DepthAxis(sites, stack))
    return tuple(found)


def _is_one_chain(run: Run, rows: Sequence[Site], sites: Sequence[Site], other: Sequence[Site]) -> bool:
    """Whether two lists of layers are parts of one chain: they share layers, or take turns in one stream."""
    if not {site.path for site in sites}.isdisjoint(site.path for site in other):
        return True
    turns = _take_turns(rows, sites, other)
    return turns and not _streams(run, sites, other)


def _take_turns(rows: Sequence[Site], left: Sequence[Site], right: Sequence[Site]) -> bool:
    """Whether the rows of both are mixed in the order of execution."""
    place = {site.path: index for index, site in enumerate(rows)}
    spans = [[place[site.path] for site in sites if site.path in place] for sites in (left, right)]
    (first, last), (begin, end) = ((min(span, default=-1), max(span, default=-1)) for span in spans)
    return first <= end and begin <= last


def _streams(run: Run, left: Sequence[Site], right: Sequence[Site]) -> bool:
    """Whether both lie in residual streams, and none of them in common."""
    streams = [
        {info.stream for info in run.info.sublayers if any(_lies_in(info.branch or info.site, s.path) for s in sites)}
        for sites in (left, right)
    ]
    return all(streams) and streams[0].isdisjoint(streams[1])


def _lies_in(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")
