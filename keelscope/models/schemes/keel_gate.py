"""Keel written with a gate, and the steps that lead from Post-LN to Keel.

The paper has neither a gate T nor a learned one; secondary texts do. The two meet: n(T x + (1 - T) F) = n(alpha x + F)
with alpha = T / (1 - T), up to epsilon, so that T = L / (L + 1) is Keel, T = 1/2 is Post-LN and T = 1 is no branch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from keelscope.models.checks import flag, number, whole
from keelscope.models.gates import Gate
from keelscope.models.residual import Place, SubLayer

if TYPE_CHECKING:
    from keelscope.models.config import ModelConfig

__all__ = ["KeelAblation", "KeelGate"]


class KeelGate(SubLayer):
    """Gated shortcut under an outer norm, as secondary texts describe Keel.

    Equation:
        x <- n1(T x + (1 - T) F(n2(x)))
    Init:
        Any. T = L / (L + 1), which equals keel with first_block=none.
    Expect:
        As keel. With gate_init = 1 the branches get gradients of exactly 0 at the first step, and a sigmoid gate never
        leaves that state. Without outer norm, signal and gradient shrink by T per sub-layer.
    Source:
        Not in the paper (arXiv 2601.19895); the gate of secondary texts about it.

    Args:
        place: Where the sub-layer stands.
        gate: One T per sub-layer (scalar), per feature (vector) or per token (token).
        gate_init: T at the beginning; None is L / (L + 1).
        activation: raw, clamp or sigmoid.
        outer_norm: Whether the sum is normalised.
    """

    name: ClassVar[str] = "keel_gate"

    def __init__(
        self,
        place: Place,
        *,
        gate: str = "scalar",
        gate_init: float | None = None,
        activation: str = "raw",
        outer_norm: bool = True,
    ) -> None:
        super().__init__(place)
        start = place.depth / (place.depth + 1) if gate_init is None else gate_init
        self.gate = Gate(place.config.width, kind=gate, start=start, activation=activation)
        self.branch_norm = place.norm()
        self.outer_norm = place.norm() if flag("outer_norm", outer_norm) else None

    def closing(self, config: ModelConfig) -> nn.Module | None:  # noqa: D102  # as in the class above
        if config.final_norm is None and self.outer_norm is not None:
            return None
        return super().closing(config)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        gate: Tensor = self.gate(x)
        x = gate * x + (1 - gate) * self.branch(self.branch_norm(x))
        return x if self.outer_norm is None else self.outer_norm(x)


class KeelAblation(SubLayer):
    """The paper's four steps from Post-LN with a strong shortcut to Keel.

    Equation:
        stage 1: x <- n(alpha x + F(x)); 2: x <- n(alpha x + F(beta x)); 3: x <- n(alpha x + F(beta n(x)));
        4: x <- n(alpha x + F(n(x)))
    Init:
        Any. alpha = L; beta is a learned vector of ones, and the inner norm of stage 3 has no gain of its own.
    Expect:
        All four are flat at init; the paper reports that stages 1 and 2 train less stably than Pre-LN.
    Source:
        arXiv 2601.19895, section 4.2; here without an exception for the first block.

    Args:
        place: Where the sub-layer stands.
        stage: 1, 2, 3 or 4; 4 is keel with first_block=none.
        alpha: Weight of the shortcut; None is the number of sub-layers.
    """

    name: ClassVar[str] = "keel_ablation"
    final_norm: ClassVar[bool] = False

    def __init__(self, place: Place, *, stage: int = 1, alpha: float | None = None) -> None:
        super().__init__(place)
        if whole("stage", stage, 1) > 4:
            raise ValueError(f"stage = {stage} cannot be used: the paper has stages 1 to 4")
        self.alpha = float(place.depth) if alpha is None else number("alpha", alpha, above=0)
        self.branch_norm = place.norm() if stage >= 3 else None
        self.beta = nn.Parameter(torch.ones(place.config.width)) if stage in {2, 3} else None
        if stage == 3 and self.branch_norm is not None:
            self.branch_norm.requires_grad_(requires_grad=False)
        self.outer_norm = place.norm()

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        entering = x if self.branch_norm is None else self.branch_norm(x)
        if self.beta is not None:
            entering = self.beta * entering
        stream: Tensor = self.outer_norm(self.alpha * x + self.branch(entering))
        return stream

    def extra_repr(self) -> str:  # noqa: D102
        return f"alpha={self.alpha:g}"
