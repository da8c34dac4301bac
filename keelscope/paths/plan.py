"""Routes as numbers, by which the hooks of the compiled kernel know what is done at which node."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keelscope.paths.routes import Before, Plan, Reader, Routes, StreamPlace
from keelscope.topology.graph import Key

__all__ = ["plan_of"]

_NO_HOP, _PLAIN, _OTHER = 0, 1, 2


def plan_of(routes: Routes) -> Plan:
    """The plan of some routes.

    Args:
        routes: the routes.

    Returns:
        The plan.
    """
    keys = tuple(routes.streams)
    index = {key: i for i, key in enumerate(keys)}
    numbers = [0] * len(keys)
    for i, place in enumerate(routes.streams.values()):
        numbers[i] = len(numbers)
        numbers += _stream(place, index)
    hooks: list[int] = []
    for node, before in routes.before.items():
        hooks += (node, len(numbers), 0)
        numbers += _before(before, index)
    for node, readers in routes.after.items():
        hooks += (node, len(numbers), 1)
        numbers += _after(readers, index)
    return Plan(keys, np.array(numbers, np.int32).tobytes(), np.array(hooks, np.int32).tobytes())


def _list(items: Iterable[int]) -> list[int]:
    found = list(items)
    return [len(found), *found]


def _stream(place: StreamPlace, index: dict[Key, int]) -> list[int]:
    hop = place.hop
    kind = _NO_HOP if hop is None else _PLAIN if hop.is_plain else _OTHER
    targets = () if hop is None else sorted(index[key] for key in hop.targets)
    return [
        *(kind, int(place.starts_here), int(place.is_end)),
        *(*_list(place.enters), *_list(place.leaves), *_list(targets)),
    ]


def _before(before: Before, index: dict[Key, int]) -> list[int]:
    arrivals = [number for key in before.arrivals for number in (index[key], key[1])]
    passes = [number for reader in before.passes for number in _reader(reader, index)]
    return [
        *(len(before.arrivals), *arrivals),
        *(*_list(index[key] for key in before.starts), *_list(before.totals)),
        *(len(before.passes), *passes),
    ]


def _after(readers: Iterable[Reader], index: dict[Key, int]) -> list[int]:
    parts = [(*_reader(reader, index), slot) for reader in readers for slot in reader.slots]
    return [len(parts), *(number for part in parts for number in part)]


def _reader(reader: Reader, index: dict[Key, int]) -> tuple[int, int, int]:
    return index[reader.stream], int(reader.is_branch), int(reader.is_carried)
