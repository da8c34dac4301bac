"""Which residual additions follow each other on one stream, and what happens to a sum before the next one starts.

After the last sub-layer nothing in the graph says whether a norm belongs to it (Post-LN) or to the model (a final
norm); the modules they lie in decide. `keelscope.topology.reading` asks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from keelscope.topology.additions import Addition
from keelscope.topology.graph import Key
from keelscope.topology.module_calls import CallSites, Surroundings
from keelscope.topology.records import Sublayer
from keelscope.topology.terms import Norm, Term, Terms, sources
from keelscope.topology.trails import ACTIVATIONS, Trail, Trails

__all__ = ["Link", "Streams"]

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Link:
    """What becomes of a sum: the way from the next stream tensor back to it."""

    trail: Trail
    number: int
    """Number of the stream."""
    is_found: bool
    """Whether a later sub-layer continues the sum; otherwise the way ends where nothing simple follows."""

    @property
    def stream(self) -> Key:
        """The next stream tensor."""
        return self.trail.keys[0]

    def after(self) -> list[tuple[str, str]]:
        """Norms and activations on the sum, first to last: symbol and path (empty for an activation)."""
        events = reversed(self.trail.events)
        pairs = [(event.kind, event.path) if isinstance(event, Norm) else (str(event), "") for event in events]
        return [(symbol.lower(), path) for symbol, path in pairs if path or symbol in ACTIVATIONS]


class Streams:
    """Links the residual additions of one graph.

    Args:
        terms: the graph and how to take it apart.
        trails: follows tensors through it.
        sites: which modules took and gave which tensor.
        around: which module a node lies in.
    """

    def __init__(self, terms: Terms, trails: Trails, sites: CallSites, around: Surroundings) -> None:
        self._terms = terms
        self._trails = trails
        self._sites = sites
        self._around = around

    def links(self, additions: Sequence[Addition], is_part: Sequence[bool]) -> list[Link]:
        """For each addition what becomes of the sum.

        Args:
            additions: in execution order.
            is_part: which of them are no sub-layers of their own.

        Returns:
            In the same order; streams are numbered from 0 in order of first appearance, those of parts last.
        """
        sums = {addition.key: position for position, addition in enumerate(additions)}
        trails: dict[int, Trail] = {}
        chains: list[int] = []
        starts: dict[tuple[Key, bool], int] = {}
        for position, addition in enumerate(additions):
            trail = self._trails.back([addition.stream])
            before = None if trail is None else sums.get(trail.keys[-1])
            start = starts.setdefault((addition.stream, is_part[position]), position)
            chains.append(start if before is None else chains[before])
            if before is not None and trail is not None:
                trails.setdefault(before, trail)
        ordered = sorted(zip(is_part, chains, strict=True), key=lambda pair: pair[0])
        numbers = {chain: number for number, chain in enumerate(dict.fromkeys(chain for _, chain in ordered))}
        return [
            Link(trails.get(i) or self._end(addition), numbers[chains[i]], is_found=i in trails)
            for i, addition in enumerate(additions)
        ]

    def preceding(self, key: Key) -> Key | None:
        """The sum or hidden region that a tensor comes from, if there is no product of matrices between."""
        while key not in self._trails.streams and not self._terms.graph.is_opaque(key[0]):
            came = sources(self._terms, key, self._trails.streams)
            if self._terms.graph.is_heavy(key[0]) or len(came) != 1:
                return None
            key = came[0]
        return key

    def own_stream(self, term: Term) -> Key:
        """The stream tensor behind a shortcut's weights, for a sum whose branch reads another stream."""
        key = term.keys[0]
        while key not in self._trails.streams:
            step = self._terms.scale(key[0])
            if step is None or key in self._terms.norms:
                break
            key = step[0]
        return key

    def _end(self, addition: Addition) -> Trail:
        return self._back(self._trails.ahead(addition), addition)

    def _back(self, keys: list[Key], addition: Addition) -> Trail:
        """The way back from the last of some tensors after a sum; a view that no module puts out is the reader's."""
        while len(keys) > 1 and self._terms.graph.is_transparent(keys[-1][0]) and self._sites.maker(keys[-1]) is None:
            keys = keys[:-1]
        return self._trails.back([keys[-1]], addition.key) or Trail([addition.key])

    def without_final_norm(self, addition: Addition, link: Link, like: Sublayer | None, *, reads_norm: bool) -> Link:
        """Cut off what follows the last sum but belongs to the model and not to the sub-layer.

        Args:
            addition: the last addition of a stream.
            link: what follows it.
            like: an earlier sub-layer of the stream with a branch of the same role, if any.
            reads_norm: whether the branch reads the stream through a norm.

        Returns:
            The shortened link.
        """
        keys = link.trail.keys[::-1]
        place = self._around.path(self._terms.graph, addition.root)
        count = 1
        while count < len(keys) and self._is_own(keys[count], place, like, reads_norm=reads_norm):
            count += 1
        return Link(self._back(keys[:count], addition), link.number, is_found=False)

    def _is_own(self, key: Key, place: str, like: Sublayer | None, *, reads_norm: bool) -> bool:
        """Whether what follows a sum belongs to the sub-layer whose sum was made in a place."""
        norm = self._terms.norms.get(key)
        path = norm.path if norm is not None else self._around.path(self._terms.graph, key[0])
        entry = self._sites.entry(place)
        if entry:
            return self._sites.entry(path) == entry
        if norm is None and self._terms.graph.names[key[0]] not in ACTIVATIONS:
            return True
        if like is not None:
            return like.norm_after is not None or like.activation is not None
        return path.startswith((f"{place}.", f"{place}:")) if place else not reads_norm


def same_role(branch: str | None, earlier: Sequence[Sublayer]) -> Sublayer | None:
    """The latest of some sub-layers whose branch has the same path up to its numbers."""
    role = _DIGITS.sub("#", branch or "")
    return next((record for record in reversed(earlier) if _DIGITS.sub("#", record.branch or "") == role), None)
