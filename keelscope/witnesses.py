"""The parameters that tell of backward passes where no probe looks at gradients: one of each stack entry, and of each
module outside of stacks.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence

from torch import nn

from keelscope.sites import WatchedParameter

__all__ = ["Witnesses"]


class Witnesses:
    """Chooses parameters by which a pass is noticed, and whether it only added to gradients.

    Args:
        watched: all parameters of a model.
        references: the same.
    """

    def __init__(self, watched: Sequence[WatchedParameter], references: Sequence[weakref.ref[nn.Parameter]]) -> None:
        numbers: dict[object, int] = {}
        self._owners = array("l", (numbers.setdefault(_place(each), len(numbers)) for each in watched))
        self._references = references
        self.are_enough = True
        """False once an optimizer has used gradients of a pass that reached none of them."""

    def chosen(self) -> Sequence[int]:
        """Indices of the first trainable parameter of each place; of all parameters, where these were not enough."""
        found: dict[int, int] = {}
        for i, owner in enumerate(self._owners) if self.are_enough else ():
            parameter = self._references[i]() if owner not in found else None
            if parameter is not None and parameter.requires_grad:
                found[owner] = i
        return list(found.values()) if self.are_enough else range(len(self._owners))

    def unnoticed(self) -> int:
        """A parameter with a gradient, where none of them was reached; negative if there is none."""
        present = ((i, reference()) for i, reference in enumerate(self._references))
        return next((i for i, parameter in present if parameter is not None and parameter.grad is not None), -1)


def _place(watched: WatchedParameter) -> object:
    return (watched.site.stack, watched.site.position) if watched.site.stack else id(watched.owner)
