"""Schemes that differ by a factor in depth only: DeepNorm, GPT-2's init, depth-muP, CompleteP, LayerNorm Scaling."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from keelscope.models.checks import number, whole
from keelscope.models.residual import Place, SubLayer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CompleteP", "DeepNorm", "DepthMuP", "GPT2ScaledInit", "LNScaling"]


class DeepNorm(SubLayer):
    """DeepNorm: Post-LN with a moderately strong shortcut and small branches.

    Equation:
        x <- n(alpha x + F(x)), alpha = L^(1/4)
    Init:
        Feed-forward, value and output matrices times beta = (4 L)^(-1/4); query and key as drawn. L = 2N sub-layers.
    Expect:
        Flat. Parameter gradients fall as 1/sqrt(L) and are uniform over depth.
    Source:
        Wang et al., DeepNet, arXiv 2203.00555 (rule for a decoder alone: (2N)^(1/4) and (8N)^(-1/4) for N blocks).

    Args:
        place: Where the sub-layer stands.
        alpha: Weight of the shortcut; None is L^(1/4).
        beta: Factor on the matrices; None is (4 L)^(-1/4).
    """

    name: ClassVar[str] = "deepnorm"
    final_norm: ClassVar[bool] = False

    def __init__(self, place: Place, *, alpha: float | None = None, beta: float | None = None) -> None:
        super().__init__(place)
        self.alpha = place.depth**0.25 if alpha is None else number("alpha", alpha, above=0)
        self.beta = (4 * place.depth) ** -0.25 if beta is None else number("beta", beta, above=0)
        self.norm = place.norm()

    def adjust_init(self) -> None:  # noqa: D102  # the init is the class's
        for matrix in self.value_path():
            matrix.weight.mul_(self.beta)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        stream: Tensor = self.norm(self.alpha * x + self.branch(x))
        return stream

    def extra_repr(self) -> str:  # noqa: D102
        return f"alpha={self.alpha:g}"


class GPT2ScaledInit(SubLayer):
    """Pre-LN with GPT-2's initialisation.

    Equation:
        x <- x + F(n(x))
    Init:
        Output matrices times 1/sqrt(L) (1/sqrt(2N) for N blocks); GPT-2 draws N(0, .02^2) before that.
    Expect:
        Flat; the stream's power at the top and the parameter gradients do not depend on depth.
    Source:
        Radford et al., GPT-2 report (2019).

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "gpt2_scaled_init"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.depth = place.depth
        self.norm = place.norm()

    def adjust_init(self) -> None:  # noqa: D102
        for unit in self.units:
            unit.output.weight.mul_(self.depth**-0.5)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.branch(self.norm(x))
        return stream


class DepthMuP(SubLayer):
    """Depth-muP: Pre-LN whose branches are divided by the square root of depth.

    Equation:
        x <- x + m^(-1/2) F(n(x)), m = L / base_depth
    Init:
        Any. The learning rate of branch matrices is multiplied by m^(-1/2), Adam's epsilon too.
    Expect:
        Flat; the stream's power does not depend on depth, parameter gradients fall as 1/sqrt(L).
    Source:
        Yang et al., arXiv 2310.02244.

    Args:
        place: Where the sub-layer stands.
        base_depth: Number of sub-layers of the model that was tuned.
    """

    name: ClassVar[str] = "depth_mup"

    def __init__(self, place: Place, *, base_depth: int = 2) -> None:
        super().__init__(place)
        self.multiplier = math.sqrt(whole("base_depth", base_depth, 1) / place.depth)
        self.norm = place.norm()

    @property
    def learning_rate_scale(self) -> float:  # noqa: D102  # the rule is the class's
        return self.multiplier

    @property
    def adam_epsilon_scale(self) -> float:  # noqa: D102
        return self.multiplier

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.multiplier * self.branch(self.norm(x))
        return stream

    def extra_repr(self) -> str:  # noqa: D102
        return f"multiplier={self.multiplier:g}"


class CompleteP(SubLayer):
    """CompleteP: Pre-LN whose branches are divided by depth.

    Equation:
        x <- x + m^(-1) F(n(x)), m = L / base_depth
    Init:
        Any. The learning rate does not change with depth; Adam's epsilon of branch matrices is divided by m.
    Expect:
        Flat; the branches add to the stream's power as 1/L, parameter gradients fall as 1/L.
    Source:
        Dey et al., arXiv 2505.01618.

    Args:
        place: Where the sub-layer stands.
        base_depth: Number of sub-layers of the model that was tuned.
    """

    name: ClassVar[str] = "completep"

    def __init__(self, place: Place, *, base_depth: int = 2) -> None:
        super().__init__(place)
        self.multiplier = whole("base_depth", base_depth, 1) / place.depth
        self.norm = place.norm()

    @property
    def adam_epsilon_scale(self) -> float:  # noqa: D102
        return self.multiplier

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.multiplier * self.branch(self.norm(x))
        return stream

    def extra_repr(self) -> str:  # noqa: D102
        return f"multiplier={self.multiplier:g}"


class LNScaling(SubLayer):
    """LayerNorm Scaling: Pre-LN whose normalised branch inputs shrink with the depth of the block.

    Equation:
        x <- x + F(n(x) / sqrt(b)), b = 1, 2, ... the block
    Init:
        Any; its authors advise against scaled output matrices.
    Expect:
        The stream's power grows about as log L, parameter gradients fall with the depth of the block as b^(-1/2).
    Source:
        Sun et al., arXiv 2502.05795.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "ln_scaling"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.factor = (place.block + 1) ** -0.5
        self.norm = place.norm()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.branch(self.factor * self.norm(x))
        return stream

    def extra_repr(self) -> str:  # noqa: D102
        return f"factor={self.factor:g}"
