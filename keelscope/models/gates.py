"""`Gate`: a learned number T per layer, per feature or per token, shared by the gated schemes.

It is a module of its own, so that a tool sees the values of T as the output of one site.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from keelscope.models.checks import choice, fraction

__all__ = ["ACTIVATIONS", "KINDS", "Gate"]

KINDS = ("scalar", "vector", "token")
ACTIVATIONS = ("raw", "clamp", "sigmoid")


class Gate(nn.Module):
    """T = act(b), with b a number or a vector, or T = act(w x + b), one number per token.

    Args:
        width: Number of features of the stream.
        kind: ``scalar``, ``vector`` or ``token`` (w starts at 0).
        start: T at the beginning, from 0 to 1.
        activation: ``raw`` (T = b, free to leave [0, 1]), ``clamp`` (cut to [0, 1]; no gradient outside) or ``sigmoid``
            (a start at 0 or 1 is then out of reach of every gradient).

    Raises:
        ValueError: For a kind, start or activation that cannot be used.

    Example:
        >>> Gate(2, kind="vector", start=0.25, activation="sigmoid")(torch.zeros(2)).tolist()
        [0.25, 0.25]
    """

    def __init__(self, width: int, *, kind: str = "scalar", start: float, activation: str = "raw") -> None:
        super().__init__()
        choice("gate", kind, KINDS)
        self.activation = choice("activation", activation, ACTIVATIONS)
        value = torch.tensor(fraction("gate_init", start))
        bias = torch.logit(value) if activation == "sigmoid" else value
        self.bias = nn.Parameter(bias.repeat(width) if kind == "vector" else bias)
        self.weight = nn.Parameter(torch.zeros(width)) if kind == "token" else None

    def forward(self, x: Tensor) -> Tensor:
        """The value of T.

        Args:
            x: The stream ``[batch, position, width]``, read by token gates only.

        Returns:
            A number, ``[width]``, or ``[batch, position, 1]``.
        """
        value: Tensor = self.bias
        if self.weight is not None:
            value = value + (x @ self.weight).unsqueeze(-1)  # [batch, position, 1]
        if self.activation == "clamp":
            return value.clamp(0, 1)
        return value.sigmoid() if self.activation == "sigmoid" else value
