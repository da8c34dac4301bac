"""Schemes with several streams that are read, mixed and written by learned weights: Hyper-Connections and mHC.

Their state is one tensor ``[batch, position, stream, width]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from keelscope.models.checks import flag, whole
from keelscope.models.residual import Place, SubLayer

if TYPE_CHECKING:
    from keelscope.models.config import ModelConfig

__all__ = ["MHC", "HyperConnections", "sinkhorn"]


DECLARED = (
    {
        "form": "A x + b F(n c x)",
        "schemes": ("hyper_connections", "mhc"),
        "branch": "branch",
        "norm_before": "norm",
    },
)
"""What one entry is, for tools that look for a sum of shortcut and branch: the shortcut passes a product with the
mixing matrix A, so that they find none."""


class Copies(nn.Module):
    """The embedding in every stream.

    Args:
        streams: Number of streams.
    """

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        """Copy the stream.

        Args:
            x: ``[batch, position, width]``.

        Returns:
            ``[batch, position, stream, width]``.
        """
        return x.unsqueeze(-2).repeat(1, 1, self.streams, 1)


class JoinStreams(nn.Module):
    """The sum of all streams behind the final norm.

    Args:
        norm: The final norm; None leaves the sum as it is.
    """

    def __init__(self, norm: nn.Module | None) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, state: Tensor) -> Tensor:
        """Join the streams.

        Args:
            state: ``[batch, position, stream, width]``.

        Returns:
            ``[batch, position, width]``.
        """
        total = state.sum(-2)
        return total if self.norm is None else self.norm(total)


class HyperConnections(SubLayer):
    """Hyper-Connections: several streams with learned reading, writing and mixing weights.

    Equation:
        H <- A H + beta F(n(a . H)), each weight = static + s tanh(n(H) W) when dynamic
    Init:
        A = identity, a = one stream in turn (l mod m), beta = 1, W = 0, s = 0.01.
    Expect:
        Exactly pre_ln at init, in every stream; the product of learned A's is free to blow up.
    Source:
        Zhu et al., arXiv 2409.19606.

    Args:
        place: Where the sub-layer stands.
        streams: Number m of streams.
        dynamic: Whether the weights also depend on the token.
    """

    name: ClassVar[str] = "hyper_connections"
    residual_topology = DECLARED

    def __init__(self, place: Place, *, streams: int = 4, dynamic: bool = True) -> None:
        super().__init__(place)
        self.streams = whole("streams", streams, 1)
        width = place.config.width
        self.norm = place.norm()
        self.read = nn.Parameter(torch.eye(streams)[place.index % streams])
        self.mix = nn.Parameter(torch.eye(streams))
        self.write = nn.Parameter(torch.ones(streams))
        self.weights_norm = place.norm() if flag("dynamic", dynamic) else None
        if dynamic:
            self.dynamic = nn.Parameter(torch.zeros(width, streams + 2))
            self.dynamic_scale = nn.Parameter(torch.full((3,), 0.01))

    def opening(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        del config
        return Copies(self.streams)

    def closing(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        return JoinStreams(super().closing(config))

    def _weights(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reading ``[..., stream]``, mixing ``[..., stream, stream]`` and writing ``[..., stream]`` weights."""
        if self.weights_norm is None:
            return self.read, self.mix, self.write
        dynamic = torch.tanh(self.weights_norm(state) @ self.dynamic)  # [batch, position, stream, stream + 2]
        read, mix, write = self.dynamic_scale
        return (
            self.read + read * dynamic[..., 0],
            self.mix + mix * dynamic[..., 2:].transpose(-1, -2),
            self.write + write * dynamic[..., 1],
        )

    def forward(self, state: Tensor) -> Tensor:  # noqa: D102  # the equation is the class's
        read, mix, write = self._weights(state)
        reading = (read.unsqueeze(-1) * state).sum(-2)  # [batch, position, width]
        output = self.branch(self.norm(reading))
        streams: Tensor = mix @ state + write.unsqueeze(-1) * output.unsqueeze(-2)
        return streams


def sinkhorn(logits: Tensor, steps: int = 20) -> Tensor:
    """Bring ``exp(logits)`` to unit column and row sums by turns; rows come last and are exact.

    Args:
        logits: ``[..., row, column]``.
        steps: Number of turns; columns are exact in the limit only.

    Returns:
        Nearly doubly stochastic matrices, same shape.

    Example:
        >>> sinkhorn(torch.tensor([[5.0, 0.0], [1.0, 2.0]])).sum(-1).round(decimals=4)
        tensor([1., 1.])
    """
    for _ in range(steps):
        logits = logits.log_softmax(-2)
        logits = logits.log_softmax(-1)
    return logits.exp()


class MHC(SubLayer):
    """mHC: Hyper-Connections whose mixing matrices are doubly stochastic, so that no product of them grows.

    Equation:
        H <- R H + w F(n(p . H)), R = sinkhorn(r + s vec(H) W), p = sigmoid(.), w = 2 sigmoid(.)
    Init:
        R near the identity (logit 4 on the diagonal, our choice), p = 1/m, w = 1, W = 0, s = 0.01.
    Expect:
        pre_ln at init, in every stream. Mixing matrices have spectral norm 1; products of many tend to averaging.
    Source:
        Xie et al., arXiv 2512.24880.

    Args:
        place: Where the sub-layer stands.
        streams: Number m of streams.
        dynamic: Whether the weights also depend on the token.
        steps: Turns of the Sinkhorn iteration.
    """

    name: ClassVar[str] = "mhc"
    residual_topology = DECLARED

    def __init__(self, place: Place, *, streams: int = 4, dynamic: bool = True, steps: int = 20) -> None:
        super().__init__(place)
        self.streams = whole("streams", streams, 1)
        self.steps = whole("steps", steps, 1)
        flat = streams * place.config.width
        self.norm = place.norm()
        share = torch.full((streams,), 1 / streams)
        self.read = nn.Parameter(torch.logit(share).clamp(max=4.0))
        self.mix = nn.Parameter(4.0 * torch.eye(streams))
        self.write = nn.Parameter(torch.zeros(streams))
        self.weights_norm = place.norm(flat) if flag("dynamic", dynamic) else None
        if dynamic:
            self.dynamic = nn.Parameter(torch.zeros(flat, streams * (streams + 2)))
            self.dynamic_scale = nn.Parameter(torch.full((3,), 0.01))

    def opening(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        del config
        return Copies(self.streams)

    def closing(self, config: ModelConfig) -> nn.Module:  # noqa: D102
        return JoinStreams(super().closing(config))

    def _weights(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reading ``[..., stream]``, mixing ``[..., stream, stream]`` and writing ``[..., stream]`` weights."""
        read, mix, write = self.read, self.mix, self.write
        if self.weights_norm is not None:
            m = self.streams
            dynamic = self.weights_norm(state.flatten(-2)) @ self.dynamic  # [batch, position, m (m + 2)]
            read = read + self.dynamic_scale[0] * dynamic[..., :m]
            write = write + self.dynamic_scale[1] * dynamic[..., m : 2 * m]
            mix = mix + self.dynamic_scale[2] * dynamic[..., 2 * m :].unflatten(-1, (m, m))
        return read.sigmoid(), sinkhorn(mix, self.steps), 2 * write.sigmoid()

    def forward(self, state: Tensor) -> Tensor:  # noqa: D102
        read, mix, write = self._weights(state)
        reading = (read.unsqueeze(-1) * state).sum(-2)  # [batch, position, width]
        output = self.branch(self.norm(reading))
        streams: Tensor = mix @ state + write.unsqueeze(-1) * output.unsqueeze(-2)
        return streams
