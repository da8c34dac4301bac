"""Which modules need no hook: where probes look at residual sub-layers alone, most of them have nothing to say.

Their calls are heard by `keelscope.ears`, as far as anybody listens. What is left for the hooks after modules is to
notice that a step begins, and which modules run. For the first those are enough that run inside no other, and the first
of all to end; the second is over for a module that was seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from operator import is_not

from keelscope.placements import Placements
from keelscope.probe import Axis, Probe
from keelscope.sites import SitePlan

__all__ = ["Sparing"]


class Sparing:
    """Takes the hooks off modules that were seen, as long as graphs repeat their shape.

    Args:
        placements: the hooks of a watch.
        probes: all of its probes.
        is_told: whether the watch is told when a step is complete, as by an optimizer, and keeps no calls.
    """

    def __init__(self, placements: Placements, probes: Iterable[Probe], *, is_told: bool) -> None:
        self._placements = placements
        self._is_possible = is_told and all(probe.tap.axis is Axis.SUBLAYER for probe in probes)
        self._asked: tuple[tuple[SitePlan | None, frozenset[str] | None], int] = (None, None), -1
        self._sites: frozenset[int] = frozenset()

    def choose(self, plan: SitePlan, seen: Set[int], fringe: frozenset[str] | None) -> None:
        """A step is complete.

        Args:
            plan: the sites.
            seen: identity of the modules that were seen so far; a set that only grows.
            fringe: paths of the modules in which each forward begins and ends; None where that is not known.
        """
        if not self._is_possible:
            return
        asked = (plan, fringe), len(seen)
        if self._asked[1] != asked[1] or any(map(is_not, self._asked[0], asked[0])):
            self._asked, self._sites = asked, frozenset() if fringe is None else _spared(plan, seen, fringe)
        self._placements.spare(self._sites)


def _spared(plan: SitePlan, seen: Set[int], fringe: frozenset[str]) -> frozenset[int]:
    needed = {id(module) for path, module in plan.everything if path in fringe}
    sites = ((site, id(watched.module)) for site, watched in enumerate(plan.modules))
    return frozenset(site for site, module in sites if module in seen and module not in needed)
