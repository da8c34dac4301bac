"""Schemes that place norms differently over depth or inside attention: Mix-LN and HybridNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from keelscope.models.checks import flag, fraction
from keelscope.models.residual import Place, SubLayer
from keelscope.models.sublayers import Attention

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["HybridNorm", "MixLN"]


class MixLN(SubLayer):
    """Mix-LN: Post-LN in the lower part of the stack, Pre-LN above.

    Equation:
        x <- n(x + F(x)) in the first floor(a N) of N blocks, x <- x + F(n(x)) above
    Init:
        Any.
    Expect:
        Inside the lower part the shortcut vanishes as in post_ln, above it not at all: it still vanishes, only with a L
        instead of L.
    Source:
        Li et al., arXiv 2412.13795.

    Args:
        place: Where the sub-layer stands.
        post_share: Share a of the blocks that are Post-LN.
    """

    name: ClassVar[str] = "mix_ln"

    def __init__(self, place: Place, *, post_share: float = 0.25) -> None:
        super().__init__(place)
        self.post = place.block < int(fraction("post_share", post_share) * place.config.blocks)
        self.norm = place.norm()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        stream: Tensor = self.norm(x + self.branch(x)) if self.post else x + self.branch(self.norm(x))
        return stream

    def extra_repr(self) -> str:  # noqa: D102
        return "post" if self.post else "pre"


class HybridNorm(SubLayer):
    """HybridNorm: attention without a norm on its input but on queries, keys and values; Post-LN feed-forward.

    Equation:
        attention: x <- x + attn(x) with n on Q, K and V of each head; feed-forward: y = n(x), x <- y + F(y)
    Init:
        Any.
    Expect:
        Vanishes along the shortcut and at late tokens, a little slower than post_ln.
    Source:
        Zhuo et al., arXiv 2503.04598.

    Args:
        place: Where the sub-layer stands.
        star: Whether the first block has a norm before attention and a plain shortcut around feed-forward.
    """

    name: ClassVar[str] = "hybrid_norm"

    def __init__(self, place: Place, *, star: bool = False) -> None:
        super().__init__(place)
        special = flag("star", star) and place.block == 0
        self.is_attention = place.is_attention
        self.plain = special or place.is_attention
        self.norm = place.norm() if special or not place.is_attention else None
        if isinstance(self.branch, Attention):
            head = place.config.width // place.config.heads
            self.branch.query_norm = place.norm(head)
            self.branch.key_norm = place.norm(head)
            self.branch.value_norm = place.norm(head)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        normed: Tensor = x if self.norm is None else self.norm(x)
        stream: Tensor = (x if self.plain else normed) + self.branch(normed)
        return stream
