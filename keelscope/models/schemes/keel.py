"""Keel: an outer norm around a shortcut that is as strong as the stack is deep."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from keelscope.models.checks import choice, flag, number
from keelscope.models.residual import Place, SubLayer

__all__ = ["Keel"]


class Keel(SubLayer):
    r"""Keel: Post-LN with a shortcut weight alpha and a norm on the branch input.

    Equation:
        x <- n1(alpha x + F(n2(x)))
    Init:
        Any, no scaling with depth. alpha = L, the number of sub-layers.
    Expect:
        Flat at any depth. Parameter gradients fall as 1/L and are uniform over depth, but for the first block, whose
        branches are not divided by alpha: about 0.63 L times larger, by design.
    Source:
        "Post-LayerNorm Is Back", arXiv 2601.19895 v2, eq. 8. First block v1: version 1 of the same paper.

    Args:
        place: Where the sub-layer stands.
        alpha: Weight of the shortcut; None is the number of sub-layers.
        alpha_learnable: Whether each sub-layer learns its alpha.
        first_block: Exceptions for the first block. v2: no outer norm on the attention, no alpha on both sub-layers.
            v1: neither on both (a Pre-LN block). none: no exception.
    """

    name: ClassVar[str] = "keel"
    final_norm: ClassVar[bool] = False

    def __init__(
        self, place: Place, *, alpha: float | None = None, alpha_learnable: bool = False, first_block: str = "v2"
    ) -> None:
        super().__init__(place)
        choice("first_block", first_block, ("v2", "v1", "none"))
        weight = float(place.depth) if alpha is None else number("alpha", alpha, above=0)
        special = place.block == 0 and first_block != "none"
        bare = special and (first_block == "v1" or place.is_attention)
        self.alpha: float | nn.Parameter = 1.0 if special else weight
        if flag("alpha_learnable", alpha_learnable) and not special:
            self.alpha = nn.Parameter(torch.tensor(weight))
        self.branch_norm = place.norm()
        self.outer_norm = None if bare else place.norm()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        x = self.alpha * x + self.branch(self.branch_norm(x))
        return x if self.outer_norm is None else self.outer_norm(x)

    def extra_repr(self) -> str:  # noqa: D102
        return f"alpha={float(self.alpha):g}"
