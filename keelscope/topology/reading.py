"""From the graph of one forward to records: `Reading` joins what additions, sides and streams say of each sub-layer.

`keelscope.topology.GraphReader` makes one per graph and lets go of it afterwards, since it holds the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from keelscope.topology.additions import Addition, residual_additions
from keelscope.topology.coefficients import Coefficients, product
from keelscope.topology.forms import SECOND, Parts, equation
from keelscope.topology.gaps import Gaps
from keelscope.topology.graph import Graph, Key
from keelscope.topology.held import Held, Own
from keelscope.topology.in_place import InPlaceSums
from keelscope.topology.live import LiveGate, LiveGraph, Places, Recipes, of_additions, of_declared
from keelscope.topology.merging import Outline, Segment
from keelscope.topology.module_calls import CallSites, ModuleCall, Surroundings, interior
from keelscope.topology.normalisations import find_norms
from keelscope.topology.records import Sublayer, Topology
from keelscope.topology.sides import BranchSide, ShortcutSide, Sides
from keelscope.topology.streams import Link, Streams, same_role
from keelscope.topology.terms import Norm, Terms
from keelscope.topology.trails import Trails

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
        calls: the module calls in the order in which they ended.
        model: the model.
        entries: paths of stack entries.
        held: the parameters that modules hold during their forward.
    """

    def __init__(
        self,
        graph: Graph,
        calls: Sequence[ModuleCall],
        model: nn.Module,
        entries: Iterable[str],
        held: Held | None = None,
    ) -> None:
        norms: dict[Key, Norm] = {}
        self.graph = graph
        self._sites = CallSites(graph, calls, entries)
        own = Own(model)
        terms = Terms(graph, own, norms)
        inside = find_norms(terms, norms, calls)
        for call in calls:
            inside |= interior(graph, call) if call.kind == "recurrent" else set()
        self._additions, streams = residual_additions(terms, inside)
        trails = Trails(terms, streams)
        dropped = {key for call in calls if call.kind == "dropout" for key in call.outputs}
        sums = [(a.root, graph.nodes[a.root]) for a in self._additions if graph.names[a.root] == "CopySlices"]
        self.in_place = InPlaceSums(sums)
        """Weights that only a backward pass shows."""
        beside = {} if held is None else held.beside(own)
        self._weights = Coefficients(terms, model, self._sites, dropped, self.in_place.weights, own, beside)
        self._sides = Sides(trails, self._weights)
        around = Surroundings(calls)
        self._streams = Streams(terms, trails, self._sites, around)
        self._gaps = Gaps(terms, trails, around)
        self._terms, self._trails, self._calls = terms, trails, calls
        self._places: dict[int, tuple[Addition, Key]] = {}

    def read(self) -> tuple[Topology, Outline]:
        """Everything that the graph shows; asked again after a backward pass, with the weights of in-place sums.

        Returns:
            Records without references to the graph, and how its parts follow each other.
        """
        found = self._found()
        return self._topology(found), self._outline([one for one in found if one.owner is None])

    def _topology(self, found: Sequence[_Found]) -> Topology:
        places: dict[int, int] = {}
        sublayers: list[Sublayer] = []
        for position, one in enumerate(found):
            if one.owner is None:
                places[position] = len(sublayers)
                sublayers.append(self._record(one, sublayers))
        further = [self._record(one, ()) for one in found if one.owner is not None]
        owners = [places.get(one.owner) for one in found if one.owner is not None]
        further = [replace(record, index=i, part_of=owners[i], stream=-1) for i, record in enumerate(further)]
        for record in further:
            owner = record.part_of
            if owner is not None and record.form.startswith(SECOND):
                sublayers[owner] = replace(sublayers[owner], form=f"{sublayers[owner].form}, {record.form}")
        unknown = self._gaps.reasons([one.addition for one in found])
        return Topology(tuple(sublayers), tuple(further), unknown=tuple(unknown))

    def _outline(self, found: Sequence[_Found]) -> Outline:
        graph = self.graph
        streams = {one.addition.key: one.link.number for one in found}
        hidden = self._gaps.hidden()
        starts: dict[Segment, Key] = {}
        for one in found:
            starts.setdefault(one.link.number, one.addition.stream)
        for i in hidden:
            key = next((key for key in graph.inputs[i] if key is not None), None)
            starts.update({} if key is None else {graph.nodes[i]: key})
        origins: dict[Segment, Segment] = {}
        for segment, start in starts.items():
            before = self._streams.preceding(start)
            if before is not None and (before in streams or before[0] in hidden):
                origins[segment] = streams[before] if before in streams else graph.nodes[before[0]]
        numbers = tuple(graph.number(one.addition.root) for one in found)
        reasons = {graph.nodes[i]: reason for i, reason in hidden.items()}
        return Outline(numbers, {graph.nodes[i]: graph.number(i) for i in hidden}, reasons, origins)

    def live(self, topology: Topology, tensors: Mapping[Key, Tensor]) -> LiveGraph:
        """The sub-layers as places in the graph.

        Args:
            topology: what was read, completed.
            tensors: what modules took and gave.

        Returns:
            The graph with its sub-layers in execution order; those of hidden regions are missing.
        """
        found = of_additions(topology.sublayers, self._places, self._trails)
        found += of_declared(topology.sublayers, self._calls)
        found.sort(key=lambda sublayer: sublayer.index)
        seconds = [record for record in topology.further if record.form.startswith(SECOND)]
        further = of_additions(seconds, self._places, self._trails)
        recipes = Recipes(self._trails, self._terms, tensors)
        places = Places(tuple(found), tuple(further), tuple(map(recipes.of, found)))
        return LiveGraph(places, self.graph.nodes, tensors, self._weights.entries, self.graph)

    def gates(self) -> list[LiveGate]:
        """Weights that depend on data, while their numbers are there."""
        nodes = self.graph.nodes
        return [LiveGate(source, nodes[source.key[0]], weights) for source, weights in self._weights.live()]

    def expects_more(self) -> bool:
        """Whether the next backward pass will show more, which is then listened to."""
        self.in_place.listen()
        return bool(self.in_place) or any(name == "CheckpointFunction" for name in self.graph.names)

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
        number = self.graph.number(addition.root)
        self._places[number] = addition, link.stream
        return Sublayer(
            len(earlier),
            self.graph.nodes[addition.root].name(),
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
            number=number,
        )

    def _site_of(self, link: Link) -> str | None:
        """A module that put out the stream tensor after a sum."""
        for key in link.trail.keys:
            maker = self._sites.maker(key)
            if maker is not None or not self.graph.is_transparent(key[0]):
                return maker
        return None
