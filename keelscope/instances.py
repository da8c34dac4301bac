"""The live objects of a class, for what nothing that we hold leads to: gradient scalers and compiled wrappers."""

from __future__ import annotations

import gc
from typing import TypeVar

__all__ = ["instances_of"]

T = TypeVar("T")


def instances_of(kind: type[T]) -> list[T]:
    """Every live object of a class or of a subclass of it.

    An object refers to its class, so only its referrers are looked at. `gc.get_objects` would take hold of everything
    alive, also of a tuple that another thread is just building, which then fails in that thread.

    Args:
        kind: a class made in Python.

    Returns:
        The objects, in no particular order.

    Example:
        >>> class Wanted: ...
        >>> one, other = Wanted(), type("Sub", (Wanted,), {})()
        >>> len(instances_of(Wanted))
        2
    """
    kinds = [kind, *_subclasses(kind)]
    found = gc.get_referrers(*kinds)
    wanted = {id(one) for one in kinds}
    return [one for one in found if id(type(one)) in wanted]


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = type.__subclasses__(kind)
    return [*direct, *(below for one in direct for below in _subclasses(one))]
