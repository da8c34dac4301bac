"""Which session watches which model: one at a time, and none left open when the interpreter ends.

`keelscope.session` enters every new session here. A notebook cell that runs twice must not count twice.
"""

from __future__ import annotations

import atexit
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Protocol

from torch import nn

from keelscope.errors import RecordingWarning

__all__ = ["OpenSession", "enter"]


class OpenSession(Protocol):
    """What this module needs to know of a session."""

    def close(self) -> None:
        """End it; harmless when repeated."""


_open: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OpenSession]] = weakref.WeakKeyDictionary()


def enter(model: nn.Module, session: OpenSession) -> Callable[[], None]:
    """Make a session the only one of its model; an earlier one is closed, with a warning.

    Args:
        model: the watched model.
        session: the new session.

    Returns:
        What to call when the session is closed.
    """
    previous = _open.get(model)
    earlier = previous() if previous else None
    if earlier is not None:
        warnings.warn(
            "This model was already watched; the earlier watch is closed and its rows are kept. Call close() on it, or "
            "use `with watch(...)`, to end a watch yourself.",
            RecordingWarning,
            stacklevel=5,
        )
        earlier.close()
    reference = weakref.ref(session)
    _open[model] = reference
    at_exit = atexit.register(partial(_close, reference))
    return partial(_leave, weakref.ref(model), reference, at_exit)


def _leave(model: weakref.ref[nn.Module], session: weakref.ref[OpenSession], at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    watched = model()
    if watched is not None and _open.get(watched) is session:
        del _open[watched]


def _close(session: weakref.ref[OpenSession]) -> None:
    """Close what is still open when the interpreter ends."""
    alive = session()
    if alive is not None:
        alive.close()
