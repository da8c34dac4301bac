"""From the graph of one forward to records: `Reading` joins what additions, trails and coefficients say of a sub-layer.

`keelscope.topology.GraphReader` makes one per graph and lets go of it afterwards, since it holds the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from keelscope.additions import Addition, Norm, Terms, residual_additions
from keelscope.coefficients import Coefficients, product
from keelscope.graph import Graph, Key
from keelscope.normalisations import ModuleCall, Surroundings, find_norms, interior
from keelscope.schemes_by_form import Parts, equation, schemes_of, schemes_of_stack
from keelscope.sides import Sides
from keelscope.sublayer import Sublayer, Topology
from keelscope.trails import ACTIVATIONS, Trail, Trails

__all__ = ["Reading"]

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class _Link:
    """What becomes of a sum: the way from the next stream tensor back to it."""

    trail: Trail
    is_found: bool
    """Whether a later sub-layer continues the sum; otherwise the way ends where nothing simple follows."""

    @property
    def stream(self) -> Key:
        """The next stream tensor."""
        return self.trail.keys[0]


class Reading:
    """Reads the topology of one graph.

    Args:
        graph: the graph.
        model: the model.
        calls: the module calls in the order in which they ended.
        entries: paths of stack entries.
    """

    def __init__(self, graph: Graph, model: nn.Module, calls: Sequence[ModuleCall], entries: Iterable[str]) -> None:
        self._graph = graph
        self._entries = frozenset(entries)
        self._outputs = _positions(calls, of_inputs=False)
        self._paths = [call.path for call in calls]
        self._inputs = _positions(calls, of_inputs=True)
        self._around = Surroundings(calls)
        norms: dict[Key, Norm] = {}
        self._terms = Terms(graph, {id(parameter) for parameter in model.parameters()}, norms)
        inside = find_norms(self._terms, norms, calls)
        for call in calls:
            inside |= interior(graph, call) if call.kind == "recurrent" else set()
        self._additions, streams = residual_additions(self._terms, inside)
        self._trails = Trails(self._terms, streams)
        dropped = {key for call in calls if call.kind == "dropout" for key in call.outputs}
        sites = {key: self._paths[found[-1]] for key, found in self._outputs.items()}
        self._weights = Coefficients(self._terms, model, sites, dropped)
        self._sides = Sides(self._trails, self._weights)

    def topology(self) -> Topology:
        """Everything that the graph shows.

        Returns:
            Records without references to the graph.
        """
        links, chains = self._chained()
        depths: dict[int, int] = {}
        for chain in chains:
            depths[chain] = depths.get(chain, 0) + 1
        records: list[Sublayer] = []
        for addition, link, chain in zip(self._additions, links, chains, strict=True):
            records.append(self._record(addition, link, records, (chain, depths[chain])))
        streams = [[record for record in records if record.stream == number] for number in depths]
        schemes = [schemes_of_stack([s.form for s in stream], [s.schemes for s in stream]) for stream in streams]
        return Topology(tuple(records), tuple(schemes), ())

    def _chained(self) -> tuple[list[_Link], list[int]]:
        """For each addition what becomes of the sum, and the number of its stream."""
        links: dict[Key, _Link] = {}
        chains: dict[Key, int] = {}
        number = 0
        for addition in self._additions:
            trail = self._trails.back([addition.stream])
            chain = None if trail is None else chains.get(trail.keys[-1])
            if trail is not None:
                links.setdefault(trail.keys[-1], _Link(trail, is_found=True))
            chains[addition.key] = number if chain is None else chain
            number += chain is None
        found = [links.get(addition.key) or self._last(addition) for addition in self._additions]
        return found, [chains[addition.key] for addition in self._additions]

    def _last(self, addition: Addition) -> _Link:
        keys = self._trails.ahead(addition)
        return _Link(self._trails.back([keys[-1]], addition.key) or Trail([addition.key]), is_found=False)

    def _record(self, addition: Addition, link: _Link, earlier: Sequence[Sublayer], place: tuple[int, int]) -> Sublayer:
        chain, depth = place
        shortcut, branch = self._sides.shortcut(addition), self._sides.branch(addition)
        outputs = (found[-1] for key in branch.outputs if (found := self._outputs.get(key)))
        branch_site = next((self._paths[call] for call in outputs), None)
        if not link.is_found:
            link = self._own(addition, link, branch_site, [s for s in earlier if s.stream == chain])
        after = [event for event in reversed(link.trail.events) if isinstance(event, Norm) or event in ACTIVATIONS]
        post = self._weights.of(link.trail.inner_factors())
        parts = Parts(
            product([shortcut.alpha, post]),
            product([branch.beta, post]),
            branch.reads,
            inner=branch.inner_norm is not None,
            branch_norm=branch.norm is not None,
            shortcut_norm=shortcut.norm is not None,
            after=tuple(event.kind if isinstance(event, Norm) else str(event).lower() for event in after),
        )
        is_known = "unknown" not in {parts.alpha.kind, parts.beta.kind, branch.entry.kind} and not branch.note
        form = equation(parts) if is_known else "unknown"
        norm_after = next((event.path for event in after if isinstance(event, Norm)), None)
        return Sublayer(
            len(earlier),
            self._graph.nodes[addition.root].name(),
            self._site(addition.stream),
            branch_site,
            parts.alpha,
            parts.beta,
            branch.norm_before,
            norm_after,
            branch.norm,
            self._site_of_stream(link),
            self._branch_sites(branch.region, {branch.norm_before, branch.norm, norm_after}),
            form,
            schemes_of(form, parts.alpha, parts.beta, depth),
            inner_norm=branch.inner_norm,
            shortcut_norm=shortcut.norm,
            entry=branch.entry,
            activation=next((str(event).lower() for event in after if not isinstance(event, Norm)), None),
            read_by=next((self._paths[i] for i in self._inputs.get(link.stream, ())), None),
            stream=chain,
            notes=(branch.note,) if branch.note else (),
        )

    def _own(self, addition: Addition, link: _Link, branch: str | None, earlier: Sequence[Sublayer]) -> _Link:
        """Cut off what follows the last sum but belongs to the model and not to the sub-layer (a final norm)."""
        keys = link.trail.keys[::-1]
        last = 0
        for position, key in enumerate(keys):
            norm = self._terms.norms.get(key)
            activation = self._graph.names[key[0]] in ACTIVATIONS
            if norm is not None and not self._is_own(addition, norm.path, branch, earlier):
                break
            around = self._around.of(self._graph, key[0])
            if activation and around is not None and not self._is_own(addition, around.path, branch, earlier):
                break
            last = position
        return _Link(self._trails.back([keys[last]], addition.key) or Trail([addition.key]), is_found=False)

    def _is_own(self, addition: Addition, path: str, branch: str | None, earlier: Sequence[Sublayer]) -> bool:
        """Whether a norm after the last sum belongs to the sub-layer, and is not the model's final norm."""
        around = self._around.of(self._graph, addition.root)
        place = "" if around is None else around.path
        entry = self._entry_of(place)
        if entry:
            return self._entry_of(path) == entry
        role = _DIGITS.sub("#", branch or "")
        for record in reversed(earlier):
            if _DIGITS.sub("#", record.branch or "") == role:
                return record.norm_after is not None or record.activation is not None
        if place:
            return path.startswith((f"{place}.", f"{place}:"))
        return not self._sides.branch(addition).norm_before

    def _entry_of(self, path: str) -> str:
        """The stack entry that a path lies in."""
        parts = path.partition(":")[0].split(".")
        ahead = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return next((entry for entry in ahead if entry in self._entries), "")

    def _site(self, key: Key) -> str | None:
        """A module that put out a tensor: a stack entry, or else the innermost one."""
        found = [self._paths[i] for i in self._outputs.get(key, ())]
        return next((path for path in found if path in self._entries), found[0] if found else None)

    def _site_of_stream(self, link: _Link) -> str | None:
        for key in link.trail.keys:
            if key in self._outputs or not self._graph.is_transparent(key[0]):
                return self._site(key)
        return None

    def _branch_sites(self, region: Iterable[Key], norms: set[str | None]) -> tuple[str, ...]:
        found = sorted({i for key in region for i in self._outputs.get(key, ())})
        return tuple(dict.fromkeys(self._paths[i] for i in found if self._paths[i] not in norms))


def _positions(calls: Sequence[ModuleCall], *, of_inputs: bool) -> dict[Key, list[int]]:
    """Which calls took or gave a tensor."""
    found: dict[Key, list[int]] = {}
    for i, call in enumerate(calls):
        for key in call.inputs if of_inputs else call.outputs:
            found.setdefault(key, []).append(i)
    return found
