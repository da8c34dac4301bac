"""Highway: the convex gate between carrying and transforming."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from keelscope.models.checks import number
from keelscope.models.gates import Gate
from keelscope.models.residual import Place, SubLayer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Highway"]


class Highway(SubLayer):
    """Highway: what the branch adds, the shortcut gives up.

    Equation:
        x <- T F(n(x)) + (1 - T) x, T = sigmoid(b) or sigmoid(w x + b)
    Init:
        Any. b = -2, w = 0.
    Expect:
        The shortcut vanishes by exactly -log10(1 - T) decades per sub-layer: 0.0551 at b = -2.
    Source:
        Srivastava et al., arXiv 1505.00387; the norm on the branch is ours, as in transformers.

    Args:
        place: Where the sub-layer stands.
        gate: One T per sub-layer (scalar), per feature (vector) or per token (token).
        gate_bias: b at the beginning; the source advises -1 to -3.
    """

    name: ClassVar[str] = "highway"

    def __init__(self, place: Place, *, gate: str = "scalar", gate_bias: float = -2.0) -> None:
        super().__init__(place)
        start = 1 / (1 + math.exp(-number("gate_bias", gate_bias)))
        self.gate = Gate(place.config.width, kind=gate, start=start, activation="sigmoid")
        self.norm = place.norm()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        gate: Tensor = self.gate(x)
        stream: Tensor = gate * self.branch(self.norm(x)) + (1 - gate) * x
        return stream
