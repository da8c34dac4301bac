"""Keeps secrets and bulk out of the stored run configuration.

Used by `encoding`; a run file is meant to be passed on, so it must not carry what a colleague should not see.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from numbers import Integral, Real

__all__ = ["redacted"]

_SECRET = re.compile(r"(^|[^a-z])(api_?key|key|token|secret|password|passwd|credentials?)$")
_MAX_TEXT = 10_000


def redacted(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration as JSON values without secrets.

    Text under a key that ends in key, token, secret, password or credential becomes ``"(removed)"``; text over 10,000
    characters is cut; NaN and infinities, which JSON lacks, become text; anything else JSON lacks becomes its `str`.

    Args:
        config: the configuration as given.

    Returns:
        A copy made of JSON values.

    Example:
        >>> redacted({"lr": 0.1, "hub": {"api_token": "abc"}, "tokens": 512, "shape": (2, 3)})
        {'lr': 0.1, 'hub': {'api_token': '(removed)'}, 'tokens': 512, 'shape': [2, 3]}
    """
    return {str(key): _value(str(key), value) for key, value in config.items()}


def _value(key: str, value: object) -> object:
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, (list, tuple)):
        return [_value(key, entry) for entry in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Real):
        return _number(value)
    text = str(value)
    if _SECRET.search(_words(key)):
        return "(removed)"
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " (cut)"


def _number(value: Real) -> object:
    if isinstance(value, Integral):
        return int(value)
    return float(value) if math.isfinite(value) else str(float(value))


def _words(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower()
