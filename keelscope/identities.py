"""Sets of identities of objects, for those that are kept: 8 bytes each, where a set takes 70."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set

import numpy as np

__all__ = ["Identities", "Numbered"]


def _place(known: Sequence[int], key: object) -> int:
    """Where a number is among rising ones, -1 if it is not there."""
    if not isinstance(key, int) or not known or not known[0] <= key <= known[-1]:
        return -1
    at = bisect_left(known, key)
    return at if known[at] == key else -1


class Identities(Set[int]):
    """A set that takes in many at once.

    Args:
        found: what it has to begin with.

    Example:
        >>> known = Identities([5, 3])
        >>> known.update([3, 8])
        >>> known == {3, 5, 8}
        True
    """

    __slots__ = ("_rising",)

    def __init__(self, found: Iterable[int] = ()) -> None:
        self._rising = array("Q", sorted(set(found)))

    def __contains__(self, key: object) -> bool:
        return _place(self._rising, key) >= 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._rising)

    def __len__(self) -> int:
        return len(self._rising)

    def update(self, found: Iterable[int]) -> None:
        """Take in others."""
        fresh = {key for key in found if key not in self}
        if fresh:
            self._rising = array("Q", sorted(fresh.union(self._rising)))


class Numbered:
    """Objects by their identity.

    Args:
        objects: each once.
    """

    __slots__ = ("_numbers", "_rising")

    def __init__(self, objects: Iterable[object]) -> None:
        found = np.array(array("Q", map(id, objects)), np.uint64)
        numbers = np.argsort(found, kind="stable")
        self._rising = array("Q", found[numbers].tobytes())
        self._numbers = array("q", numbers.astype(np.int64).tobytes())

    def __contains__(self, key: object) -> bool:
        return _place(self._rising, key) >= 0

    def number(self, key: int) -> int:
        """Which of the objects has this identity; -1 if none has."""
        at = _place(self._rising, key)
        return self._numbers[at] if at >= 0 else -1
