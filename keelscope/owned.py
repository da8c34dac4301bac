"""Which parameters of a model an optimizer holds."""

from __future__ import annotations

from torch.optim import Optimizer

from keelscope import kernel
from keelscope.identities import Numbered

__all__ = ["Owned"]


class Owned:
    """The parameters of optimizers, by index.

    Args:
        index: of the parameters.
    """

    def __init__(self, index: Numbered) -> None:
        self._index = index
        self._known: dict[int, tuple[list[bytes], list[int]]] = {}
        self._now: dict[int, list[int]] = {}

    def begin(self) -> None:
        """A step begins."""
        self._now.clear()

    def of(self, optimizer: Optimizer) -> list[int]:
        """Indices of the optimizer's parameters: looked up once a step, and nearly always the same."""
        now = self._now.get(id(optimizer))
        if now is not None:
            return now
        groups = [group["params"] for group in optimizer.param_groups]
        known = self._known.get(id(optimizer))
        if known is None or len(groups) != len(known[0]) or not all(map(kernel.are_identities, groups, known[0])):
            identities = list(map(kernel.identities, groups))
            held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            found = [i for i in map(self._index.number, held) if i >= 0]
            known = self._known[id(optimizer)] = identities, found
        self._now[id(optimizer)] = known[1]
        return known[1]
