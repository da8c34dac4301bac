"""The edges of a graph in flat arrays: a tuple for each node and tensor would take more room than all the rest."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch.autograd.graph import Node

__all__ = ["Inputs", "Key", "Readers"]

Key = tuple[int, int]
"""A tensor of the graph: index of the node that made it, and which of the node's outputs it is."""


class Inputs:
    """Per node its input tensors; None where one needs no gradient.

    Args:
        nodes: the nodes.
        index: where each stands among them.
        first: the key of the first output of each, which all share who keep it.
    """

    def __init__(self, nodes: Sequence[Node], index: Mapping[Node, int], first: Sequence[Key]) -> None:
        self._first = first
        self.starts = array("i", [0])
        """Per node where its edges begin, and the end of all."""
        self.sources = array("i")
        """Per edge the node that made the tensor, -1 for None."""
        self.outputs = array("i")
        """Per edge which output of that node it is."""
        for node in nodes:
            for source, output in node.next_functions:
                self.sources.append(-1 if source is None else index.get(source, -1))
                self.outputs.append(output)
            self.starts.append(len(self.sources))

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int) -> tuple[Key | None, ...]:
        start, end = self.starts[index], self.starts[index + 1]
        edges = zip(self.sources[start:end], self.outputs[start:end], strict=True)
        return tuple([None if i < 0 else (i, output) if output else self._first[i] for i, output in edges])

    def __iter__(self) -> Iterator[tuple[Key | None, ...]]:
        return map(self.__getitem__, range(len(self)))


class Readers:
    """Per tensor the nodes that take it.

    Args:
        inputs: what each node takes.
    """

    def __init__(self, inputs: Inputs) -> None:
        sources, outputs = np.array(inputs.sources, np.int32), np.array(inputs.outputs, np.int32)
        takers = np.repeat(np.arange(len(inputs), dtype=np.int32), np.diff(inputs.starts))
        order = np.argsort(sources, kind="stable")
        self._ends = np.searchsorted(sources[order], np.arange(-1, len(inputs)), side="right")
        self._takers, self._outputs = takers[order], outputs[order]

    def __getitem__(self, key: Key) -> tuple[int, ...]:
        """In order, one entry per use."""
        start, end = self._ends[key[0]], self._ends[key[0] + 1]
        found = zip(self._takers[start:end].tolist(), self._outputs[start:end].tolist(), strict=True)
        return tuple([taker for taker, output in found if output == key[1]])
