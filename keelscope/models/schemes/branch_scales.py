"""Schemes that start with branches that are switched off or nearly so: ReZero, SkipInit, LayerScale, Fixup."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from keelscope.models.checks import number
from keelscope.models.residual import Place, SubLayer

__all__ = ["Fixup", "LayerScale", "ReZero", "SkipInit"]


class ReZero(SubLayer):
    """ReZero: a learned number on each branch, 0 at the beginning, and no norm.

    Equation:
        x <- x + alpha F(x)
    Init:
        Any. alpha = 0.
    Expect:
        The identity at init: every profile exactly flat. Branch gradients are exactly 0 at the first step, those of
        alpha are not: alive.
    Source:
        Bachlechner et al., arXiv 2003.04887.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "rezero"
    final_norm: ClassVar[bool] = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        stream: Tensor = x + self.alpha * self.branch(x)
        return stream


class SkipInit(SubLayer):
    """SkipInit: ReZero's algebra, made for networks that gave up batch normalisation; other starts than 0 are allowed.

    Equation:
        x <- x + alpha F(x)
    Init:
        Any. alpha = 0 by default; the paper also tries 1/sqrt(number of branches).
    Expect:
        As rezero when alpha starts at 0.
    Source:
        De & Smith, arXiv 2002.10444 (residual convolutional networks, with biases and dropout).

    Args:
        place: Where the sub-layer stands.
        alpha: Weight of the branch at the beginning.
    """

    name: ClassVar[str] = "skipinit"
    final_norm: ClassVar[bool] = False

    def __init__(self, place: Place, *, alpha: float = 0.0) -> None:
        super().__init__(place)
        self.alpha = nn.Parameter(torch.tensor(number("alpha", alpha)))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.alpha * self.branch(x)
        return stream


class LayerScale(SubLayer):
    """LayerScale: Pre-LN with a small learned number per feature on each branch.

    Equation:
        x <- x + lambda * F(n(x)), feature by feature
    Init:
        Any. lambda = 0.1 up to 18 blocks, 1e-5 up to 24, 1e-6 beyond.
    Expect:
        Flat. Parameter gradients are proportional to lambda and do not depend on depth.
    Source:
        Touvron et al., CaiT, arXiv 2103.17239.

    Args:
        place: Where the sub-layer stands.
        scale: lambda at the beginning; None follows the number of blocks.
    """

    name: ClassVar[str] = "layerscale"

    def __init__(self, place: Place, *, scale: float | None = None) -> None:
        super().__init__(place)
        blocks = place.config.blocks
        by_depth = 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
        start = by_depth if scale is None else number("scale", scale)
        self.norm = place.norm()
        self.scale = nn.Parameter(torch.full((place.config.width,), start))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.scale * self.branch(self.norm(x))
        return stream


class Fixup(SubLayer):
    """Fixup: no norm; branches start at 0 and grow at a speed that does not depend on depth.

    Equation:
        x <- x + s F(x + b1) + b2
    Init:
        The last matrix of each branch is 0, the one before it is multiplied by L^(-1/2) (two matrices in a row, L
        branches). s = 1, b1 = b2 = 0, one number each. The head is left as drawn, so that gradients flow at step 0.
    Expect:
        The identity at init. Gradients exist in last matrices only and fall as 1/sqrt(L).
    Source:
        Zhang et al., arXiv 1901.09321.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "fixup"
    final_norm: ClassVar[bool] = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.depth = place.depth
        self.multiplier = nn.Parameter(torch.ones(()))
        self.bias_in = nn.Parameter(torch.zeros(()))
        self.bias_out = nn.Parameter(torch.zeros(()))

    def adjust_init(self) -> None:  # noqa: D102  # the init is the class's
        for matrix in self.value_path():
            matrix.weight.mul_(self.depth**-0.5)
        for unit in self.units:
            unit.output.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.multiplier * self.branch(x + self.bias_in) + self.bias_out
        return stream
