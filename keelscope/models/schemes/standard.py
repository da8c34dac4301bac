"""The two schemes that everything else is compared with: Post-LN and Pre-LN."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from keelscope.models.residual import Place, SubLayer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PostLN", "PreLN"]


class PostLN(SubLayer):
    r"""Post-LN: the norm stands on the stream, after the addition.

    Equation:
        x <- n(x + F(x))
    Init:
        Xavier or fan-in.
    Expect:
        The gradient vanishes geometrically along the shortcut, by 1/2 log10(1 + v) decades per sub-layer (v = branch
        power over stream power; 0.11 with unit gain), and at late tokens, while the whole-tensor gradient looks flat
        in causal models. Parameter gradients at the top do not depend on depth.
    Source:
        Vaswani et al., arXiv 1706.03762; analysed by Xiong et al., arXiv 2002.04745.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "post_ln"
    final_norm: ClassVar[bool] = False

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.norm = place.norm()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = self.norm(x + self.branch(x))
        return stream


class PreLN(SubLayer):
    r"""Pre-LN: the norm stands on the branch, and the stream is never normalised before the head.

    Equation:
        x <- x + F(n(x))
    Init:
        Any.
    Expect:
        The stream's power grows linearly with depth, parameter gradients at the top fall as 1/sqrt(L). The gradient
        grows slightly towards the input; the shortcut passes it unchanged.
    Source:
        Xiong et al., arXiv 2002.04745.

    Args:
        place: Where the sub-layer stands.
    """

    name: ClassVar[str] = "pre_ln"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.norm = place.norm()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        stream: Tensor = x + self.branch(self.norm(x))
        return stream
