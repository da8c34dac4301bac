"""Which modules have to be listened to: all of them until graphs repeat their shape, a few from then on.

Nodes of a graph of a known shape are found without modules (`keelscope.topology.imprint`). Modules show the tensors
that meet in the sums, and the ends from which the graph is walked.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import TypeAlias

from keelscope.topology.graph import Key

__all__ = ["Hearing", "Shown", "enough"]

Shown: TypeAlias = Key | int
"""A tensor, or a node by its place."""


@dataclass(frozen=True, slots=True, eq=False)
class Hearing:
    """Modules that are listened to, by path."""

    begun: frozenset[str]
    """Those whose beginning is heard too: calls of these are inside no others, but for frames around stacks."""
    ended: frozenset[str]
    """Those of which only the end is heard."""

    def __contains__(self, path: str) -> bool:
        return path in self.begun or path in self.ended


def enough(calls: Iterable[tuple[str, Iterable[Shown]]], wanted: Set[Shown], begun: Set[str]) -> frozenset[str] | None:
    """Modules whose calls show all that is wanted.

    Args:
        calls: path and what it shows, for each call.
        wanted: what has to be shown.
        begun: modules that are heard anyway.

    Returns:
        Few modules beside these; None if all calls together do not show it.

    Example:
        >>> sorted(enough([("a.b", [1]), ("a", [1, 2]), ("c", [3]), ("d", [2])], {1, 2, 3}, {"c"}))
        ['a']
    """
    shown: dict[str, set[Shown]] = {}
    for path, things in calls:
        shown.setdefault(path, set()).update(thing for thing in things if thing in wanted)
    left = set(wanted).difference(*(things for path, things in shown.items() if path in begun))
    found = set()
    for path in sorted(shown, key=lambda path: -len(shown[path])):
        if left & shown[path]:
            found.add(path)
            left -= shown[path]
    return None if left else frozenset(found)
