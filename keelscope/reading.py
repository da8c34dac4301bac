"""From the graph of one forward to records: `Reading` joins what additions, sides and streams say of each sub-layer.

`keelscope.topology.GraphReader` makes one per graph and lets go of it afterwards, since it holds the graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from keelscope.additions import Addition, Norm, Terms, residual_additions
from keelscope.coefficients import Coefficients, product
from keelscope.gaps import Gaps
from keelscope.graph import Graph, Key
from keelscope.module_calls import CallSites, ModuleCall, Surroundings, interior
from keelscope.normalisations import find_norms
from keelscope.schemes_by_form import SECOND, Parts, equation, schemes_of, schemes_of_stack
from keelscope.sides import BranchSide, ShortcutSide, Sides
from keelscope.streams import Link, Streams, same_role
from keelscope.sublayer import Sublayer, Topology
from keelscope.trails import Trails

__all__ = ["Reading"]


@dataclass(frozen=True, slots=True)
class _Found:
    """One addition with both sides and what becomes of the sum."""

    addition: Addition
    shortcut: ShortcutSide
    branch: BranchSide
    link: Link
    owner: int | None
    """Position of the addition that it is part of."""

    @property
    def is_second(self) -> bool:
        """Whether it adds the branch of another addition to a second stream."""
        return self.owner is not None and not self.branch.region


class Reading:
    """Reads the topology of one graph.

    Args:
        graph: the graph.
        model: the model.
        calls: the module calls in the order in which they ended.
        entries: paths of stack entries.
    """

    def __init__(self, graph: Graph, model: nn.Module, calls: Sequence[ModuleCall], entries: Iterable[str]) -> None:
        norms: dict[Key, Norm] = {}
        self._graph = graph
        self._sites = CallSites(calls, entries)
        terms = Terms(graph, {id(parameter) for parameter in model.parameters()}, norms)
        inside = find_norms(terms, norms, calls)
        for call in calls:
            inside |= interior(graph, call) if call.kind == "recurrent" else set()
        self._additions, streams = residual_additions(terms, inside)
        trails = Trails(terms, streams)
        dropped = {key for call in calls if call.kind == "dropout" for key in call.outputs}
        self._weights = Coefficients(terms, model, self._sites, dropped)
        self._sides = Sides(trails, self._weights)
        around = Surroundings(calls)
        self._streams = Streams(terms, trails, self._sites, around)
        self._gaps = Gaps(terms, trails, around)

    def topology(self) -> Topology:
        """Everything that the graph shows.

        Returns:
            Records without references to the graph.
        """
        found = self._found()
        depths = Counter(one.link.number for one in found if one.owner is None)
        places: dict[int, int] = {}
        sublayers: list[Sublayer] = []
        for position, one in enumerate(found):
            if one.owner is None:
                places[position] = len(sublayers)
                sublayers.append(self._record(one, sublayers))
        further = [self._record(one, ()) for one in found if one.owner is not None]
        owners = [places.get(one.owner) for one in found if one.owner is not None]
        further = [replace(record, index=i, part_of=owners[i]) for i, record in enumerate(further)]
        forms = {owners[i]: record.form for i, record in enumerate(further) if record.form.startswith(SECOND)}
        sublayers = [_named(record, forms.get(i), depths[record.stream]) for i, record in enumerate(sublayers)]
        unknown = self._gaps.reasons([one.addition for one in found])
        return Topology(tuple(sublayers), tuple(further), _schemes(sublayers), tuple(unknown))

    def _found(self) -> list[_Found]:
        """All additions; those that lie in a branch or take up the branch of another one know to which they belong."""
        additions: list[Addition] = []
        branches: list[BranchSide] = []
        owners: dict[int, int] = {}
        ends: dict[Key, int] = {}
        sums = {addition.key: position for position, addition in enumerate(self._additions)}
        for position, addition in enumerate(self._additions):
            shared = ends.setdefault(self._sides.end(addition), position)
            if shared == position:
                branches.append(self._sides.branch(addition))
                for key in branches[-1].region:
                    owners.setdefault(sums.get(key, -1), position)
                additions.append(addition)
            else:
                owners[position] = shared
                branches.append(self._sides.second(addition))
                additions.append(replace(addition, stream=self._streams.own_stream(addition.shortcuts[0])))
        is_part = [position in owners for position in range(len(additions))]
        links = self._streams.links(additions, is_part)
        return [
            _Found(addition, self._sides.shortcut(addition), branches[i], links[i], owners.get(i))
            for i, addition in enumerate(additions)
        ]

    def _record(self, found: _Found, earlier: Sequence[Sublayer]) -> Sublayer:
        addition, shortcut, branch, link = found.addition, found.shortcut, found.branch, found.link
        branch_site = self._sites.outermost_maker(branch.outputs)
        if not link.is_found:
            like = same_role(branch_site, [record for record in earlier if record.stream == link.number])
            link = self._streams.without_final_norm(addition, link, like, reads_norm=branch.norm_before is not None)
        after = link.after()
        post = self._weights.of(link.trail.inner_factors())
        parts = Parts(
            product([shortcut.alpha, post]),
            product([branch.beta, post]),
            branch.reads,
            inner=branch.inner_norm is not None,
            branch_norm=branch.norm is not None,
            shortcut_norm=shortcut.norm is not None,
            after=tuple(symbol for symbol, _ in after),
        )
        is_known = "unknown" not in {parts.alpha.kind, parts.beta.kind, branch.entry.kind} and not branch.note
        norm_after = next((path for _, path in after if path), None)
        return Sublayer(
            len(earlier),
            self._graph.nodes[addition.root].name(),
            self._sites.maker(addition.stream),
            branch_site,
            parts.alpha,
            parts.beta,
            branch.norm_before,
            norm_after,
            branch.norm,
            self._site_of(link),
            self._sites.makers(branch.region, {branch.norm_before, branch.norm, norm_after}),
            equation(parts) if is_known else "unknown",
            (),
            inner_norm=branch.inner_norm,
            shortcut_norm=shortcut.norm,
            entry=branch.entry,
            activation=next((symbol for symbol, path in after if not path), None),
            read_by=self._sites.taker(link.stream),
            stream=link.number,
            note=branch.note,
        )

    def _site_of(self, link: Link) -> str | None:
        """A module that put out the stream tensor after a sum."""
        for key in link.trail.keys:
            maker = self._sites.maker(key)
            if maker is not None or not self._graph.is_transparent(key[0]):
                return maker
        return None


def _named(record: Sublayer, second: str | None, depth: int) -> Sublayer:
    form = record.form if second is None else f"{record.form}, {second}"
    return replace(record, form=form, schemes=schemes_of(form, record.alpha, record.beta, depth))


def _schemes(sublayers: Sequence[Sublayer]) -> tuple[tuple[str, ...], ...]:
    """Per stream the schemes that it follows."""
    streams: dict[int, list[Sublayer]] = {}
    for record in sublayers:
        streams.setdefault(record.stream, []).append(record)
    ordered = [streams[number] for number in sorted(streams)]
    return tuple(schemes_of_stack([s.form for s in stream], [s.schemes for s in stream]) for stream in ordered)
