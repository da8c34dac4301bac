"""Width, heads and vocabulary of a model, as its configuration or its layers have them.

Stored with a run of the model, so that `keelscope compare --like` can build reference models of the same size.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

__all__ = ["sizes_of"]

NAMES = {
    "width": ("width", "hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("heads", "num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocabulary", "vocab_size"),
}
"""What configurations call each size."""


def sizes_of(model: nn.Module) -> dict[str, int]:
    """The sizes that are known.

    Args:
        model: any module; ``model.config`` is asked first, then its norms and embeddings.

    Returns:
        Some of ``width``, ``heads`` and ``vocabulary``.

    Example:
        >>> sizes_of(nn.Sequential(nn.Embedding(100, 8), nn.LayerNorm(8), nn.MultiheadAttention(8, 2)))
        {'width': 8, 'heads': 2, 'vocabulary': 100}
    """
    config = getattr(model, "config", None)
    said = {name: _first(config, keys) for name, keys in NAMES.items()}
    found = {"width": _width(model), "heads": _heads(model), "vocabulary": _vocabulary(model)}
    sizes = {name: said[name] or found[name] for name in NAMES}
    return {name: size for name, size in sizes.items() if size}


def _first(config: object, keys: tuple[str, ...]) -> int:
    values = (getattr(config, key, None) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), 0)


def _width(model: nn.Module) -> int:
    """The most frequent number of features that norms have; of the embedding where there is no norm."""
    weights = (getattr(module, "weight", None) for module in model.modules() if "Norm" in _kind(module))
    norms = Counter(weight.numel() for weight in weights if weight is not None and weight.dim() == 1)
    embeddings = Counter(module.embedding_dim for module in model.modules() if isinstance(module, nn.Embedding))
    common = (norms or embeddings).most_common(1)
    return common[0][0] if common else 0


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _heads(model: nn.Module) -> int:
    found = (module.num_heads for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    return next(found, 0)


def _vocabulary(model: nn.Module) -> int:
    return max((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), default=0)
