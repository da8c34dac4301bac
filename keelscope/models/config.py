"""`ModelConfig`: the size and the ingredients of a reference model, whatever its residual scheme.

`build` fills one from its keywords; `sublayers`, `residual` and `init` read it. What belongs to one scheme only
(Keel's alpha, the bias of a highway gate) is an option of that scheme's class, not of this record.
"""

from __future__ import annotations

from dataclasses import dataclass

from keelscope.models.checks import choice, flag, fraction, number, whole
from keelscope.models.norms import NORMS

__all__ = ["FEED_FORWARDS", "INITS", "ModelConfig"]

FEED_FORWARDS = ("gelu", "relu", "swiglu")
POSITIONS = ("rotary", "learned", "none")
INITS = ("normal", "scale_norm", "scaled", "torch", "unit_gain", "xavier")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer without its residual scheme.

    Raises:
        ValueError: For a value that cannot be used, in one sentence that says what can.

    Example:
        >>> ModelConfig(depth=8).blocks
        4
        >>> ModelConfig(depth=7)
        Traceback (most recent call last):
            ...
        ValueError: depth = 7 is odd: depth counts sub-layers, and a block is two (attention and feed-forward)
    """

    depth: int = 64
    """Number of residual sub-layers L: attention, feed-forward, attention, ... A block is two."""
    width: int = 64
    """Number of features of the stream."""
    heads: int = 4
    """Number of attention heads; divides the width into even parts (rotary positions turn pairs)."""
    vocabulary: int = 256
    """Number of tokens; 256 is bytes."""
    norm: str = "rms"
    """Norm wherever a scheme has one: ``rms``, ``layer`` or ``scale``."""
    init: str = "unit_gain"
    """Initialisation of the matrices, see `keelscope.models.init`."""
    seed: int = 0
    """Seed of the initial weights."""
    feed_forward: str = "gelu"
    """Feed-forward branch: ``gelu``, ``relu`` (two matrices) or ``swiglu`` (three)."""
    expansion: float = 4.0
    """Hidden features of the feed-forward branch, as a multiple of the width."""
    experts: int = 0
    """Number of experts of every feed-forward branch; 0 is one dense branch."""
    experts_per_token: int = 2
    """Experts that handle one token."""
    bias: bool = False
    """Whether the linear maps of the branches have biases (they start at 0)."""
    epsilon: float = 1e-5
    """Epsilon of every norm."""
    dropout: float = 0.0
    """Dropout on the output of every branch."""
    final_norm: bool | None = None
    """Whether the head reads through a norm; None leaves it to the scheme."""
    embedding_std: float | None = None
    """Standard deviation of the token embedding; None leaves it to the init (1; .02 for ``normal``, ``scaled``)."""
    positions: str = "rotary"
    """How a model knows positions: ``rotary`` (in the attention branches), ``learned`` (a table that is added to the
    token embedding, drawn like it) or ``none`` (only the causal mask tells them apart)."""
    context: int = 1024
    """Longest sequence of a model with learned positions."""
    rope_base: float = 10_000.0
    """Base of the rotary position frequencies."""

    def __post_init__(self) -> None:
        self._check_sizes()
        choice("norm", self.norm, NORMS)
        choice("init", self.init, INITS)
        choice("feed_forward", self.feed_forward, FEED_FORWARDS)
        choice("positions", self.positions, POSITIONS)
        flag("bias", self.bias)
        number("expansion", self.expansion, above=0)
        number("rope_base", self.rope_base, above=1)
        fraction("dropout", self.dropout)
        if number("epsilon", self.epsilon) < 0:
            raise ValueError(f"epsilon = {self.epsilon!r} cannot be used: give 0 or a small positive number")
        if self.final_norm is not None:
            flag("final_norm", self.final_norm)
        if self.embedding_std is not None:
            number("embedding_std", self.embedding_std, above=0)

    def _check_sizes(self) -> None:
        for name in ("width", "heads"):
            whole(name, getattr(self, name), 1)
        whole("depth", self.depth, 2)
        whole("vocabulary", self.vocabulary, 2)
        whole("context", self.context, 1)
        whole("seed", self.seed, 0)
        whole("experts", self.experts, 0)
        whole("experts_per_token", self.experts_per_token, 1)
        if 0 < self.experts < self.experts_per_token:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is more than experts = {self.experts}: give fewer"
            )
        if self.depth % 2:
            raise ValueError(
                f"depth = {self.depth} is odd: depth counts sub-layers, and a block is two (attention and feed-forward)"
            )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width = {self.width} does not split into {self.heads} heads of even size: "
                f"give a multiple of {2 * self.heads}"
            )

    @property
    def blocks(self) -> int:
        """Number of blocks N = L / 2."""
        return self.depth // 2

    @property
    def hidden(self) -> int:
        """Hidden features of the feed-forward branch."""
        return max(1, round(self.expansion * self.width))
