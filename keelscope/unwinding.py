"""Lets a graph that Python has looked at be freed node by node, where torch would free it by recursion.

A node that was seen from Python has a Python object, and frees the node behind it from within its own end: some forty
thousand such nodes in a chain overflow the stack and end the process. `unwind` keeps the nodes until nothing above
them is alive, and then gives them up from the output side.

A gradient hook looks at the node of its tensor. `Breaks` lets every so-many-th of these nodes keep those behind it,
so that the recursion ends there: what is left is freed at the next garbage collection or recorded step.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Sequence

from torch.autograd.graph import Node

__all__ = ["Breaks", "give_up_dead", "hang", "unwind"]

_KEY = "keelscope: nodes behind this one"
_UNOWNED = 2  # references of a node that only this module knows: its variable and the argument of getrefcount

_dead: deque[list[Node]] = deque()


class _Kept:
    """Nodes, the output side last; hangs on the nodes above them and ends with these."""

    __slots__ = ("nodes",)

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    def __del__(self) -> None:
        # The node above is being freed right now: what it leads to must outlive this moment.
        _dead.append(self.nodes)
        if _drain not in gc.callbacks:
            gc.callbacks.append(_drain)


def unwind(nodes: Sequence[Node], tops: Iterable[Node]) -> None:
    """Free these nodes one after the other, once they are no longer needed.

    Args:
        nodes: part of a graph, each node after all nodes it takes its inputs from.
        tops: those of them that no other of them takes its inputs from.
    """
    above = set(tops)
    hang([node for node in nodes if node not in above and node.next_functions], above)


def hang(chain: list[Node], tops: Iterable[Node]) -> None:
    """Keep nodes until nothing above them is alive, then free them one after the other.

    Args:
        chain: the nodes, each after all nodes it takes its inputs from.
        tops: nodes above them.
    """
    give_up_dead()
    if chain:
        _hang(chain, tops)


class Breaks:
    """Breaks in the graphs of one model, from hook to hook."""

    distance = 61
    """Hooks from one break to the next; a prime: whatever a model repeats, each place of it has its turn."""

    def __init__(self) -> None:
        self._count = 0

    def passed(self, node: Node) -> None:
        """A hook was put on the tensor of this node."""
        self._count += 1
        if self._count == self.distance:
            self._count = 0
            self.cut(node)

    def cut(self, node: Node) -> None:
        """Let a node keep those behind it; the kernel calls it at every so-many-th tensor that it hooks."""
        behind = [below for below, _ in node.next_functions if below is not None]
        if behind:
            _hang(behind, [node])


def give_up_dead() -> None:
    """Free what hung on nodes that have ended since; it happens by itself at the next garbage collection."""
    while _dead:
        try:
            chain = _dead.popleft()
        except IndexError:  # another thread was faster
            return
        _give_up(chain)


def _hang(chain: list[Node], above: Iterable[Node]) -> None:
    kept = _Kept(chain)
    for node in above:
        metadata = getattr(node, "metadata", None)
        if isinstance(metadata, dict):
            metadata.setdefault(_KEY, []).append(kept)


def _drain(phase: str, _: object) -> None:
    if phase == "stop":
        give_up_dead()


def _give_up(chain: list[Node]) -> None:
    while chain:
        node = chain.pop()
        if sys.getrefcount(node) > _UNOWNED:  # a tensor that somebody keeps leads to it: it takes over what is left
            if chain:
                _hang(chain, [node])
            return
