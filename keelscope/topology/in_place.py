"""Sums made in place on a view: what joins the two tensors shows in the gradients only.

After ``z += x`` on a view (a Linear with bias on 3-D input returns one) autograd keeps a node that says which tensors
were joined, not how. During the backward pass that runs anyway, a sum hands the same gradient to both; a product does
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

__all__ = ["InPlaceSums"]


class InPlaceSums:
    """Measures the weights of in-place sums while gradients pass them.

    Args:
        nodes: index and node of each in-place operation to measure.
    """

    def __init__(self, nodes: Iterable[tuple[int, Node]]) -> None:
        self.weights: dict[tuple[int, int], float] = {}
        """Index of the node and of its input -> weight, for inputs whose gradient is a multiple of the output's."""
        self._nodes = list(nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def listen(self) -> None:
        """Put a hook on each node; it goes away with the graph."""
        for index, node in self._nodes:
            node.register_hook(self._hook(index))

    def _hook(self, index: int) -> Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]:
        def measure(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
            for slot, gradient in enumerate(inputs[:2]):
                weight = _multiple(gradient, outputs[0])
                if weight is not None:
                    self.weights[index, slot] = weight

        return measure


@torch.no_grad()
def _multiple(gradient: Tensor | None, whole: Tensor | None) -> float | None:
    """The number c with ``gradient == c * whole``, if there is one."""
    if gradient is None or whole is None or gradient.numel() != whole.numel():
        return None
    left, right = gradient.detach().reshape(-1).float(), whole.detach().reshape(-1).float()
    if torch.equal(left, right):
        return 1.0
    power = float(right @ right)
    weight = float(left @ right) / power if power > 0 else 0.0
    return weight if weight != 0 and torch.allclose(left, weight * right, rtol=1e-4, atol=0) else None
