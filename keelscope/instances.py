"""Every living object of a class, found without touching any other.

`gc.get_objects` holds on to all objects for a moment, the half-built tuples of other threads among them, whose growth
then fails with SystemError: a training with a data loader's thread in it cannot have that. An object refers to its
class, so the garbage collector can be asked for the class's referrers, which are few.
"""

from __future__ import annotations

import gc
from typing import TypeVar

__all__ = ["living"]

_Kind = TypeVar("_Kind")


def living(kind: type[_Kind]) -> list[_Kind]:
    """The instances of a class and of its subclasses.

    Args:
        kind: a class written in Python.

    Returns:
        The objects, in no particular order.

    Example:
        >>> class Rare: ...
        >>> one, other = Rare(), type("Rarer", (Rare,), {})()
        >>> {type(found).__name__ for found in living(Rare)} == {"Rare", "Rarer"}
        True
    """
    kinds, new = [kind], [kind]
    while new:
        new = [below for above in new for below in type.__subclasses__(above)]
        kinds.extend(new)
    return [found for found in gc.get_referrers(*kinds) if issubclass(type(found), kind)]
