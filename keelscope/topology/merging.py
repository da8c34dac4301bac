"""Topologies put together: regions that a reentrant checkpoint hid, declared sub-layers, modules called again.

`keelscope.topology.reader` hands over what it read of the forward, and of each region while the backward pass ran it
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.autograd.graph import Node

from keelscope.topology.forms import schemes_of, schemes_of_stack
from keelscope.topology.records import Sublayer, Topology

__all__ = ["Outline", "Placed", "Segment", "merged", "named", "without_repeats"]

Segment = int | str | Node
"""A stream of the forward by its number, the modules that declare it, or the node that hides a region."""


Placed = tuple[int, Sublayer]
"""When a sub-layer ran, and its record."""


@dataclass(frozen=True, slots=True)
class Outline:
    """How the parts of a forward follow each other."""

    numbers: tuple[int, ...]
    """When each sub-layer that the forward shows ran, by autograd's sequence numbers."""
    regions: Mapping[Node, int]
    """When each hidden region ran."""
    reasons: Mapping[Node, str]
    """How each hidden region is said to be unknown."""
    origins: Mapping[Segment, Segment]
    """What a stream or a region continues, if there is no product of matrices between."""


def merged(
    topology: Topology, outline: Outline, regions: Mapping[Node, Topology], declared: Mapping[str, Sequence[Placed]]
) -> Topology:
    """Put sub-layers of hidden regions and declared ones where they ran.

    Args:
        topology: what the forward showed.
        outline: how its parts follow each other.
        regions: what each region showed when it ran again.
        declared: sub-layers that modules declare, by stream, with when they ran.

    Returns:
        One topology.
    """
    regions = {node: region for node, region in regions.items() if node in outline.regions}
    found: list[tuple[tuple[int, int], Sublayer, Segment]] = [
        ((number, 0), record, record.stream) for number, record in zip(outline.numbers, topology.sublayers, strict=True)
    ]
    for node, region in regions.items():
        found += [((outline.regions[node], i), record, node) for i, record in enumerate(region.sublayers)]
    for name, placed in declared.items():
        found += [((n, i), replace(record, number=n), name) for i, (n, record) in enumerate(placed)]
    found.sort(key=lambda item: item[0])
    streams: dict[Segment, int] = {}
    sublayers = [
        replace(record, index=index, stream=streams.setdefault(_first(segment, outline.origins), len(streams)))
        for index, (_, record, segment) in enumerate(found)
    ]
    parts = (topology, *regions.values())
    places = {id(record): index for index, (_, record, _) in enumerate(found)}
    owners = [owner for part in parts for owner in _owners(part, places)]
    further = [record for part in parts for record in part.further]
    further = [replace(record, index=i, part_of=owners[i]) for i, record in enumerate(further)]
    known = {outline.reasons[node] for node in regions}
    unknown = dict.fromkeys(reason for part in parts for reason in part.unknown if reason not in known)
    return named(Topology(tuple(sublayers), tuple(further), unknown=tuple(unknown)))


def _first(segment: Segment, origins: Mapping[Segment, Segment]) -> Segment:
    while segment in origins:
        segment = origins[segment]
    return segment


def _owners(topology: Topology, places: Mapping[int, int]) -> list[int | None]:
    owners = [None if r.part_of is None else topology.sublayers[r.part_of] for r in topology.further]
    return [None if owner is None else places.get(id(owner)) for owner in owners]


def without_repeats(topology: Topology) -> Topology:
    """Leave out streams that go through the same modules as an earlier one: a second call of the model.

    Args:
        topology: everything that was read.

    Returns:
        Each sub-layer once; its further calls are in `Topology.further`.
    """
    first: dict[tuple[object, ...], list[Sublayer]] = {}
    kept: list[Sublayer] = []
    repeated: list[Sublayer] = []
    for stream in _streams(topology.sublayers).values():
        original = first.setdefault(tuple((s.branch_sites, s.form) for s in stream), stream)
        if original is stream or not all(record.branch_sites for record in stream):
            kept += stream
        else:
            pairs = zip(stream, original, strict=True)
            repeated += [replace(record, part_of=twin.index) for record, twin in pairs]
    if not repeated:
        return topology
    kept.sort(key=lambda record: record.index)
    places = {record.index: i for i, record in enumerate(kept)}
    numbers = {number: i for i, number in enumerate(dict.fromkeys(record.stream for record in kept))}
    sublayers = [replace(record, index=i, stream=numbers[record.stream]) for i, record in enumerate(kept)]
    moved = [*topology.further, *(replace(record, stream=-1) for record in repeated)]
    owners = [None if record.part_of is None else places.get(record.part_of) for record in moved]
    further = [replace(record, index=i, part_of=owners[i]) for i, record in enumerate(moved)]
    return named(replace(topology, sublayers=tuple(sublayers), further=tuple(further)))


def named(topology: Topology) -> Topology:
    """Name the schemes of every sub-layer and of every stream.

    Args:
        topology: sub-layers with their forms.

    Returns:
        The same with all names.
    """
    depths = Counter(record.stream for record in topology.sublayers)
    sublayers = tuple(
        record if record.is_declared else replace(record, schemes=_schemes(record, depths[record.stream]))
        for record in topology.sublayers
    )
    streams = _streams(sublayers)
    schemes = [schemes_of_stack([s.form for s in streams[n]], [s.schemes for s in streams[n]]) for n in sorted(streams)]
    return replace(topology, sublayers=sublayers, schemes=tuple(schemes))


def _schemes(record: Sublayer, depth: int) -> tuple[str, ...]:
    return schemes_of(record.form, record.alpha, record.beta, depth)


def _streams(sublayers: Sequence[Sublayer]) -> dict[int, list[Sublayer]]:
    streams: dict[int, list[Sublayer]] = {}
    for record in sublayers:
        streams.setdefault(record.stream, []).append(record)
    return streams
