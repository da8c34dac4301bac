"""What goes wrong inside a hook stays there: training goes on, and one warning says what is missing."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from keelscope.errors import RecordingWarning

__all__ = ["contained"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def contained(method: Callable[Concatenate[_T, _P], None]) -> Callable[Concatenate[_T, _P], None]:
    """Turn exceptions of a hook into one `RecordingWarning` per kind of failure.

    Args:
        method: a method without result that torch calls.

    Returns:
        The method, never raising an `Exception`; ``KeyboardInterrupt`` passes.
    """

    @functools.wraps(method)
    def safe(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            _warn_once(self, error)

    return safe


def _warn_once(owner: object, error: Exception) -> None:
    failures: set[str] = owner.__dict__.setdefault("_failures", set())
    text = f"{type(error).__name__}: {error}"
    if text not in failures:
        failures.add(text)
        warnings.warn(
            f"A keelscope probe failed and its values are missing; training is not affected ({text}).",
            RecordingWarning,
            stacklevel=4,
        )
