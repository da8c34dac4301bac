"""Which entries of a stack take what the entry before them gave: a chain, where parallel heads are only a list.

Read from the graph of one forward by `keelscope.topology.reader`; `keelscope.structure` counts them per stack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keelscope.topology.graph import Graph
from keelscope.topology.module_calls import ModuleCall

__all__ = ["following"]


def following(graph: Graph, calls: Sequence[ModuleCall], entries: Mapping[str, tuple[str, int]]) -> frozenset[str]:
    """The entries whose first call was given something that the entry before them made.

    Args:
        graph: the graph.
        calls: the module calls in the order in which they ended.
        entries: entry path -> stack and position.

    Returns:
        Paths of entries.
    """
    first = {entries[call.path]: call for call in reversed(calls) if call.path in entries}
    pairs = ((call, first.get((stack, position - 1))) for (stack, position), call in first.items())
    return frozenset(call.path for call, before in pairs if before is not None and _feeds(graph, before, call))


def _feeds(graph: Graph, before: ModuleCall, call: ModuleCall) -> bool:
    """Whether an output of one call is behind an input of another; nothing older than those outputs is looked at."""
    made = {key[0] for key in before.outputs}
    oldest = min(made, default=-1)
    waiting = [key[0] for key in call.inputs]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in made:
            return True
        for source in graph.inputs[node]:
            if source is not None and source[0] >= oldest and source[0] not in seen:
                seen.add(source[0])
                waiting.append(source[0])
    return False
