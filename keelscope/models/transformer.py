"""`Transformer`: a decoder-only language model around a flat stack of residual sub-layers of one scheme.

It joins the parts of its neighbours: sizes from `config`, the stack's entries from a `residual.SubLayer` subclass,
weights from `init`. `keelscope.models.build` is its front door.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Generator, Tensor, nn

from keelscope.models.init import draw_branch, draw_embedding, draw_ends
from keelscope.models.residual import Place, SubLayer
from keelscope.models.sublayers import Rotary, unturned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from keelscope.models.config import ModelConfig

__all__ = ["Transformer"]


class Transformer(nn.Module):
    """Token embedding, L residual sub-layers, head.

    Args:
        scheme: Class of the stack's entries.
        config: Sizes, ingredients and seed. Equal arguments give equal weights; the global random state is left as
            it was.
        options: Options of the scheme.
    """

    def __init__(self, scheme: type[SubLayer], config: ModelConfig, options: Mapping[str, object]) -> None:
        super().__init__()
        self.scheme = scheme.name
        self.config = config
        self.options = dict(options)
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self._make_parts(scheme)
            self._draw_weights(scheme)

    def _make_parts(self, scheme: type[SubLayer]) -> None:
        config = self.config
        rotary = Rotary(config.width // config.heads, config.rope_base) if config.positions == "rotary" else unturned
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learned" else None
        sublayers = [scheme(Place(index, config, rotary), **self.options) for index in range(config.depth)]
        self.opening = sublayers[0].opening(config)
        self.sublayers = nn.ModuleList(sublayers)
        self.closing = sublayers[-1].closing(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    @torch.no_grad()
    def _draw_weights(self, scheme: type[SubLayer]) -> None:
        generator = Generator().manual_seed(self.config.seed)
        draw_ends(self.embedding, self.head, self.config, generator)
        for sublayer in self._entries():
            draw_branch(sublayer.branch, self.config, generator)
        if self.positions is not None:
            draw_embedding(self.positions, self.config, generator)
        for sublayer in self._entries():
            sublayer.adjust_init()
        scheme.constrain_ends(self.embedding, self.head)

    def _entries(self) -> Iterable[SubLayer]:
        return cast("Iterable[SubLayer]", self.sublayers)

    def _first(self) -> SubLayer:
        return cast("SubLayer", self.sublayers[0])

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: int64 ``[batch, position]``.

        Returns:
            ``[batch, position, vocabulary]``.
        """
        state = self.embedding(tokens)  # [batch, position, width]
        if self.positions is not None:
            state = state + self._learned(tokens.shape[1])
        if self.opening is not None:
            state = self.opening(state)
        for sublayer in self._entries():
            state = sublayer.carry(state, sublayer(state))
        if self.closing is not None:
            state = self.closing(state)
        return cast("Tensor", self.head(state))

    def _learned(self, length: int) -> Tensor:
        if length > self.config.context:
            raise ValueError(
                f"{length} positions are more than the model was built for: context = {self.config.context}"
            )
        return cast("nn.Embedding", self.positions).weight[:length]  # [position, width]

    @torch.no_grad()
    def after_step(self) -> None:
        """Restore what the scheme asks of its weights; call it after each optimizer step (most schemes do nothing)."""
        for sublayer in self._entries():
            sublayer.after_step()
        self._first().constrain_ends(self.embedding, self.head)

    def parameter_groups(self, weight_decay: float) -> list[dict[str, object]]:
        """Groups for a torch optimizer: matrices of the branches, which some schemes scale; other matrices; the rest.

        Args:
            weight_decay: Decay of the matrices; norms, gates and biases do not decay.

        Returns:
            Groups with ``params``, ``weight_decay``, ``scale`` (factor on the learning rate) and, where a scheme asks
            for it, ``eps``.
        """
        first = self._first()
        hidden = [p for sublayer in self._entries() for p in sublayer.branch.parameters() if p.ndim > 1]
        known = {id(p) for p in hidden}
        ends = [p for p in self.parameters() if p.ndim > 1 and id(p) not in known]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        return [
            {
                "params": hidden,
                "weight_decay": weight_decay,
                "scale": first.learning_rate_scale,
                "eps": 1e-8 * first.adam_epsilon_scale,
            },
            {"params": ends, "weight_decay": weight_decay, "scale": 1.0},
            {"params": rest, "weight_decay": 0.0, "scale": 1.0},
        ]
