"""The norms a reference model can use, by name: rms, layer and scale.

`config` checks names against `NORMS`, `residual.Place.norm` builds one where a scheme asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NORMS", "ScaleNorm"]


class ScaleNorm(nn.Module):
    r"""``g x / max(|x|, eps)`` with one learned number g, which starts at sqrt(width).

    Equal to RMSNorm with all gains 1, up to epsilon, which is a floor for ``|x|`` here and not a summand.

    Args:
        width: Number of features.
        eps: Floor of the Euclidean norm of the input.

    Source: Nguyen & Salazar, arXiv 1910.05895.

    Example:
        >>> ScaleNorm(4)(torch.tensor([3.0, 0.0, 4.0, 0.0])).tolist()
        [1.2000000476837158, 0.0, 1.600000023841858, 0.0]
    """

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.tensor(float(width) ** 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Scale each token to the length ``gain``.

        Args:
            x: Any tensor, ``[..., width]``.

        Returns:
            Same shape.
        """
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return self.gain * x / length.clamp(min=self.eps)

    def extra_repr(self) -> str:
        """What ``print(model)`` says inside the brackets.

        Returns:
            The epsilon.
        """
        return f"eps={self.eps:g}"


def _rms(width: int, epsilon: float) -> nn.Module:
    return nn.RMSNorm(width, eps=epsilon)


def _layer(width: int, epsilon: float) -> nn.Module:
    return nn.LayerNorm(width, eps=epsilon)


def _scale(width: int, epsilon: float) -> nn.Module:
    return ScaleNorm(width, eps=epsilon)


NORMS: Final[dict[str, Callable[[int, float], nn.Module]]] = {"layer": _layer, "rms": _rms, "scale": _scale}
"""Name -> builder ``(width, epsilon) -> module``."""
