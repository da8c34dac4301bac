"""Calls of modules as tensors of the autograd graph: which module made what, and inside which others.

`keelscope.topology` notes the calls; `keelscope.topology.normalisations` and `keelscope.topology.reading` name things
after them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from keelscope.topology.graph import Graph, Key

__all__ = ["CallSites", "ModuleCall", "Surroundings", "interior"]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module during the forward."""

    path: str
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    kind: str = ""
    """norm, dropout, recurrent, container (has children), or empty."""
    span: tuple[int, int] = (-1, -1)
    """Autograd's sequence numbers before and after the call; (-1, ...) where the beginning was not seen."""


def interior(graph: Graph, call: ModuleCall) -> set[int]:
    """Nodes between the inputs and the outputs of a call.

    Args:
        graph: the graph.
        call: the call.

    Returns:
        Indices, outputs included, inputs not.
    """
    stop = {key[0] for key in call.inputs}
    first = min(stop, default=-1)
    stack = [key[0] for key in call.outputs if key[0] not in stop]
    found = set(stack)
    while stack:
        for source in graph.inputs[stack.pop()]:
            if source is not None and source[0] > first and source[0] not in stop and source[0] not in found:
                found.add(source[0])
                stack.append(source[0])
    return found


class Surroundings:
    """Which module call a node was made in.

    Args:
        calls: module calls; those whose beginning was not seen are left out.
    """

    def __init__(self, calls: Sequence[ModuleCall]) -> None:
        seen = sorted((call for call in calls if call.span[0] >= 0), key=lambda call: (call.span[0], -call.span[1]))
        self._calls = seen
        self._starts = [call.span[0] for call in seen]
        self._parents: list[int] = []
        around: list[int] = []
        for position, call in enumerate(seen):
            while around and seen[around[-1]].span[1] < call.span[1]:
                around.pop()
            self._parents.append(around[-1] if around else -1)
            around.append(position)

    def path(self, graph: Graph, index: int) -> str:
        """Path of the innermost module around a node; empty for the model itself, or if it is not known."""
        number = graph.number(index)
        position = bisect_right(self._starts, number) - 1
        while position >= 0 and self._calls[position].span[1] <= number:
            position = self._parents[position]
        return self._calls[position].path if position >= 0 else ""


class CallSites:
    """Which modules took and gave which tensor.

    Args:
        graph: the graph.
        calls: the calls in the order in which they ended.
        entries: paths of stack entries.
    """

    def __init__(self, graph: Graph, calls: Sequence[ModuleCall], entries: Iterable[str]) -> None:
        self._paths = [call.path for call in calls]
        self._alone = [len(call.outputs) == 1 for call in calls]
        self._entries = frozenset(entries)
        self._makers: dict[Key, tuple[int, ...]] = {}
        self._takers: dict[Key, int] = {}
        """The first of each tensor."""
        self._behind_views: dict[Key, int] = {}
        for position, call in enumerate(calls):
            for key in call.outputs:
                self._makers[key] = (*self._makers.get(key, ()), position)
                self._behind_views[graph.origin(key)] = position
            for key in call.inputs:
                self._takers.setdefault(key, position)

    def maker(self, key: Key) -> str | None:
        """A module that put out a tensor: a stack entry, or else the innermost one."""
        found = [self._paths[i] for i in self._makers.get(key, ())]
        return next((path for path in found if path in self._entries), found[0] if found else None)

    def only_maker(self, key: Key) -> str | None:
        """The innermost module that put out a tensor and no other one."""
        return next((self._paths[i] for i in self._makers.get(key, ()) if self._alone[i]), None)

    def outermost_maker(self, keys: Iterable[Key]) -> str | None:
        """The outermost module that put out the first of some tensors that any module put out."""
        keys = list(keys)
        found = next((self._makers[key][-1] for key in keys if key in self._makers), None)
        if found is None:  # an in-place operation on a view continues from the base
            found = next((self._behind_views[key] for key in keys if key in self._behind_views), None)
        return None if found is None else self._paths[found]

    def taker(self, key: Key) -> str | None:
        """A module that a tensor was given to."""
        return self._paths[self._takers[key]] if key in self._takers else None

    def makers(self, keys: Iterable[Key], without: Container[str | None] = ()) -> tuple[str, ...]:
        """All modules but some that put out some tensors, in the order in which they ended."""
        found = sorted({i for key in keys for i in self._makers.get(key, ())})
        return tuple(dict.fromkeys(self._paths[i] for i in found if self._paths[i] not in without))

    def entry(self, path: str) -> str:
        """The innermost stack entry that a path lies in, or an empty string."""
        parts = path.partition(":")[0].split(".")
        around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((candidate for candidate in around if candidate in self._entries), "")
