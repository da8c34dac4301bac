"""What goes wrong inside a hook stays there: training goes on, and one warning says what is missing."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Concatenate, ParamSpec, TypeVar

from keelscope.errors import RecordingWarning

__all__ = ["NO_OP", "Unscriptable", "contained", "warn_once"]

NO_OP = (getattr, (nullcontext(), "__exit__"))
"""What a hook reduces to in copies and pickles: takes anything, returns None, unpickles without keelscope."""


class Unscriptable:
    """What every hook on a module is: an object, which TorchScript cannot compile and asks for its name."""

    __slots__ = ()

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script cannot compile a module while keelscope watches it: call close() on the watch first, or "
            "use torch.jit.trace or torch.export, which leave its hooks out."
        )


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
            warn_once(self, error)

    return safe


def warn_once(owner: object, error: Exception, probe: str = "") -> None:
    """Say once per kind of failure what is missing.

    Args:
        owner: keeps what was said.
        error: what went wrong.
        probe: name of the probe whose code it was, if known.
    """
    failures: set[tuple[str, str]] = owner.__dict__.setdefault("_failures", set())
    kind = (probe, type(error).__name__ if probe else f"{type(error).__name__}: {error}")
    if kind not in failures:
        failures.add(kind)
        who = f"Probe {probe!r}" if probe else "A keelscope probe"
        what = f"{type(error).__name__}: {error}".rstrip(".")
        warnings.warn(
            f"{who} failed and its values are missing; training is not affected ({what}).",
            RecordingWarning,
            stacklevel=4,
        )
