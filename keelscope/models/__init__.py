"""Reference models: one decoder-only transformer, whose residual scheme is one small class.

They are ordinary user models to study with keelscope and import nothing of it.

    checks <- config <- sublayers <- residual <- schemes/*
                     <- init      <- transformer
"""

from __future__ import annotations

from dataclasses import fields

from keelscope.models.catalogue import Option, SchemeInfo, describe, option_names
from keelscope.models.checks import nearest
from keelscope.models.config import ModelConfig
from keelscope.models.residual import Place, SubLayer
from keelscope.models.schemes import SCHEMES
from keelscope.models.transformer import Transformer

__all__ = ["SCHEMES", "ModelConfig", "Option", "Place", "SchemeInfo", "SubLayer", "Transformer", "build", "describe"]


def build(scheme: str | type[SubLayer] = "keel", **options: object) -> Transformer:
    """Build a reference model: tokens int64 ``[batch, position]`` to logits ``[batch, position, vocabulary]``.

    Args:
        scheme: Name of a residual scheme (see `SCHEMES`), or a `SubLayer` subclass of your own.
        options: Fields of `ModelConfig` (``depth=64, width=64, heads=4, vocabulary=256, norm="rms", init="unit_gain",
            seed=0``, ...; depth counts sub-layers, a block is two) and options of the scheme (see `describe`).

    Returns:
        The model. Equal arguments give equal weights.

    Raises:
        ValueError: For an unknown scheme or option, or a value that cannot be used.

    Example:
        >>> model = build("keel", depth=8, width=16, heads=2)
        >>> len(model.sublayers), model.sublayers[7].alpha
        (8, 8.0)
        >>> build("keel", dept=8)
        Traceback (most recent call last):
            ...
        ValueError: scheme keel has no option 'dept': did you mean 'depth'?
    """
    kind = _scheme(scheme)
    sizes = {field.name for field in fields(ModelConfig)}
    own = option_names(kind)
    for name in options:
        if name not in sizes and name not in own:
            raise ValueError(f"scheme {kind.name} has no option {name!r}: {nearest(name, [*sizes, *own])}")
    config = ModelConfig(**{name: value for name, value in options.items() if name in sizes})  # type: ignore[arg-type]  # checked there
    return Transformer(kind, config, {name: value for name, value in options.items() if name in own})


def _scheme(scheme: str | type[SubLayer]) -> type[SubLayer]:
    if isinstance(scheme, type) and issubclass(scheme, SubLayer):
        return scheme
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise ValueError(f"there is no scheme {scheme!r}: {nearest(str(scheme), SCHEMES)}")
    return SCHEMES[scheme]
