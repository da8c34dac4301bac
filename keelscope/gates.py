"""What probes of gates see on one step: the weight that each gate gives, the slope behind it, and its gradient.

Weights made of a parameter are computed anew from the parameter (`keelscope.topology.squashing`), all gates at once;
those that a module puts out are seen there, on the first step in the graph that is read anyway. Gradients of parameters
are measured by `keelscope.parameters`, where those of all parameters are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import UninitializedParameter

from keelscope.board import Board
from keelscope.calls import CallRecord, StepRecord, TermSlots, terms_of
from keelscope.containment import contained, warn_once
from keelscope.entries import constant, is_measurable, on_this_rank, stored
from keelscope.gateweights import flat_copies, from_parameter, pairs_of_output, stand_ins
from keelscope.hooks import ModuleHooks
from keelscope.leaves import Handles
from keelscope.probe import Axis, Probe, Tap, TensorProbe, group_of
from keelscope.rows import Observations, module_observations, parameter_observations
from keelscope.sites import SitePlan, WatchedModule
from keelscope.store.schema import RunLayout, Site
from keelscope.topology import LiveGate, LiveOutput, Topology
from keelscope.topology.gates import ResidualGate, declared_gates, find_gates, is_small
from keelscope.topology.squashing import reachable_slopes

__all__ = ["GateHooks"]

_Found = dict[str, list[TermSlots]]


class GateHooks:
    """Measures the gates of one model.

    Args:
        plan: modules and parameters of the model.
        probes: all probes of the watch; those of other axes are ignored.
        record_for: see `keelscope.hooks.ModuleHooks`.
    """

    def __init__(
        self, plan: SitePlan, probes: Sequence[Probe], record_for: Callable[[bool | None], StepRecord]
    ) -> None:
        self.probes = tuple(probe for probe in probes if probe.tap.axis is Axis.GATE)
        self.every: Callable[[Probe], bool] = _always
        """Whether a probe records on this step."""
        self.gates: tuple[ResidualGate, ...] = ()
        """What was found; complete after the first row."""
        self.modules = ModuleHooks((), (), lambda enabled: record_for(enabled).of_gates())
        self._plan = plan
        self._listened: list[str] = []
        self._raw: dict[int, Tensor] = {}
        self._weights: _Found = {}
        self._gradients: _Found = {}
        self._handles = Handles()
        self._is_settled = False
        if self.probes:
            self._listen(declared_gates(plan))

    @functools.cached_property
    def _indices(self) -> Mapping[str, int]:
        """Path of each parameter -> its index; most models have no gate to look up."""
        return {watched.site.path: i for i, watched in enumerate(self._plan.parameters)}

    @functools.cached_property
    def _by_path(self) -> Mapping[str, nn.Module]:
        """The modules."""
        return dict(self._plan.everything)

    @property
    def gradient_probes(self) -> tuple[Probe, ...]:
        """Stand-ins for the probes of gradients, to be shown the gradients of parameters."""
        return tuple(
            TensorProbe(p.name, Tap.PARAMETER_GRADIENT, p.statistics, every=p.every, views=p.view)
            for p in self.probes
            if p.tap is Tap.GATE_GRADIENT
        )

    @property
    def parameters(self) -> list[int]:
        """Indices of the parameters behind gates; before the first row is complete, of all that may turn out so."""
        if not self.probes:
            return []
        found = {self._indices.get(gate.parameter or "") for gate in self.gates if gate.kind.startswith("learnable")}
        if not self._is_settled:
            found |= {i for i, watched in enumerate(self._plan.parameters) if is_small(watched.parameter)}
        return sorted(i for i in found if i is not None)

    @property
    def indices(self) -> list[int]:
        """Of each gate the index of the parameter that it is, -1 of those that depend on data or never change."""
        own = (gate.parameter if gate.kind.startswith("learnable") else None for gate in self.gates)
        return [self._indices.get(path or "", -1) for path in own]

    def begin(self, step: StepRecord) -> None:
        """Start a step.

        Args:
            step: its record.
        """
        self.end()
        self._weights, self._gradients, self._raw = {}, {}, {}
        if self.probes and (self._listened or not self._is_settled):
            self.modules.duties.every = self.every
            self.modules.begin(step.of_gates())

    def end(self) -> None:
        """Take the hooks off the graph."""
        self._handles.close()

    @contained
    def observe(
        self, topology: Topology, live: Sequence[LiveGate | LiveOutput], board: Board, *, is_all: bool = False
    ) -> None:
        """Look at the gates of the first graph before its backward pass, and listen to their modules from now on.

        Args:
            topology: the sub-layers.
            live: weights that depend on data, and outputs of modules that are called gates.
            board: where terms go.
            is_all: whether the topology is complete, so that no other gates will be found in it.
        """
        if not self.probes:
            return
        self.gates, self._is_settled = find_gates(topology, self._plan), is_all
        origins = {gate.source.origin: gate for gate in self.gates if gate.source is not None}
        modules = {gate.module: gate for gate in self.gates if gate.module is not None}
        seen = set(self._listened)
        for output in live:
            if isinstance(output, LiveOutput) and output.path in modules and output.path not in seen:
                named = modules[output.path]
                seen.add(output.path)
                self._put_all([named], pairs_of_output(named.steps, named.inner, output.tensor).unsqueeze(0), board)
                self._await(named, output.node, output.output, board)
        weights = [one for one in live if isinstance(one, LiveGate)]
        for weight in sorted(weights, key=lambda one: one.source.steps is None):
            gate = origins.get(weight.source.origin)
            if gate is not None and (gate.module or gate.path) not in seen:
                seen.add(gate.module or gate.path)
                self._look_at(gate, weight, board)
        self._listen(self.gates)

    def settle(self, topology: Topology | None) -> None:
        """Fix the gates, when all of the first step is known."""
        if not self._is_settled and self.probes:
            self.gates = find_gates(topology, self._plan)
            self._listen(self.gates)
            self._is_settled = True

    def snapshot(self) -> None:
        """Keep the parameters as the step uses them; called before an optimizer changes them, once or more."""
        if self._raw or (self._is_settled and not self.gates):
            return
        if not any(probe.tap is Tap.GATE and self.every(probe) for probe in self.probes):
            return
        wanted = {i: self._plan.parameters[i].parameter for i in self.parameters}
        ready = {i: p.detach() for i, p in wanted.items() if not isinstance(p, UninitializedParameter)}
        flat = {i: stored(tensor) for i, tensor in ready.items() if is_measurable(tensor)}
        self._raw = flat_copies({i: tensor for i, tensor in flat.items() if tensor.numel()})

    @contained
    def measure(self, board: Board) -> None:
        """Compute the weights of gates made of parameters, buffers and constants.

        Args:
            board: where terms go.
        """
        self.snapshot()
        groups: dict[tuple[object, ...], list[tuple[ResidualGate, Tensor]]] = {}
        for gate in self.gates:
            raw = self._number(gate)
            if raw is not None:
                key = (gate.steps, gate.kind == "buffer", raw.numel(), raw.dtype, raw.device)
                groups.setdefault(key, []).append((gate, raw))
        for several in groups.values():
            first = several[0][0]
            raws = torch.stack([raw for _, raw in several])  # [gate, entry]
            weights, slopes = from_parameter(first, raws)
            pairs = torch.stack([weights.double(), slopes.double()], dim=-1)  # [gate, entry, 2]
            self._put_all([gate for gate, _ in several], pairs, board)

    def along(self, tap: Tap, step: StepRecord) -> Observations:
        """What was seen on a step.

        Args:
            tap: a tap of gates.
            step: the step.

        Returns:
            Index of the gate -> its observations.
        """
        is_gradient = tap is Tap.GATE_GRADIENT
        early = self._gradients if is_gradient else self._weights
        calls = self._called(Tap.OUTPUT_GRADIENT if is_gradient else Tap.OUTPUT, step.of_gates().calls)
        parameters = parameter_observations(Tap.PARAMETER_GRADIENT, step.parameters) if is_gradient else {}
        found: dict[int, list[TermSlots]] = {}
        for index, gate in enumerate(self.gates):
            slots = [*early.get(gate.path, ()), *calls.get(gate.module or "", ())]
            if is_gradient and gate.kind.startswith("learnable"):
                slots = parameters.get(self._indices.get(gate.parameter or "", -1), [])
            if slots:
                found[index] = slots
        return found

    def sites(self) -> tuple[Site, ...]:
        """The axis of gates."""
        sites = []
        for gate in self.gates:
            stack, position = self._plan.place(gate.path.partition(":")[0].partition("@")[0])
            index = self._indices.get(gate.path)
            size = 0 if index is None else self._plan.parameters[index].site.numel
            sites.append(Site(gate.path, gate.kind, "gate", stack, position, size))
        return tuple(sites)

    def completed(self, layout: RunLayout) -> RunLayout:
        """A layout that also says of gates which are recorded as they are stored, and which once only.

        Args:
            layout: the layout of the run.

        Returns:
            The layout.
        """
        raw = [gate.path for gate in self.gates if gate.is_raw and not gate.is_fleeting]
        once = [gate.path for gate in self.gates if gate.is_fleeting]
        fixed = any(gate.value is not None for gate in self.gates)
        notes = {"constants": "as in the first recorded step"} if fixed else {}
        notes |= {"as_stored": ", ".join(raw), "first_step_only": ", ".join(once)}
        said = {key: text for key, text in notes.items() if text}
        names = {group_of(probe) for probe in self.probes}
        groups = [
            replace(group, provenance={**group.provenance, **said}) if group.name in names else group
            for group in layout.groups
        ]
        return replace(layout, groups=tuple(groups))

    def release(self) -> None:
        """Let go of the model."""
        self.end()
        self.gates, self.probes = (), ()
        self._plan = SitePlan((), (), (), self._plan.stacks)
        self._raw = {}
        for found in ("_by_path", "_indices"):
            self.__dict__.pop(found, None)

    def _number(self, gate: ResidualGate) -> Tensor | None:
        """The parameter, buffer or number of a gate; None where its module says what it is."""
        if gate.value is not None:
            return constant(gate.value, torch.device("cpu")).reshape(1)
        if gate.module is not None or gate.parameter is None or gate.kind.startswith("gate"):
            return None
        index = self._indices.get(gate.parameter, -1)
        if index in self._raw or gate.kind != "buffer":
            return self._raw.get(index)
        prefix, _, name = gate.parameter.rpartition(".")
        owner = self._by_path.get(prefix)
        frozen = None if owner is None else owner._parameters.get(name)
        tensor = frozen if owner is None or frozen is not None else owner._buffers.get(name)
        return None if tensor is None or not is_measurable(tensor) else stored(tensor.detach())

    def _listen(self, gates: Sequence[ResidualGate]) -> None:
        """Put hooks on the modules whose output is a gate, each once."""
        for gate in gates:
            module = self._by_path.get(gate.module or "")
            if gate.module and module is not None and gate.module not in self._listened:
                self._listened.append(gate.module)
                site = Site(gate.module, type(module).__name__)
                self.modules.add(WatchedModule(module, site), stand_ins(gate, self.probes))

    def _look_at(self, gate: ResidualGate, live: LiveGate, board: Board) -> None:
        """See a gate in the graph of the first forward."""
        if live.weights is not None:
            steps = None if gate.inner is None else (*gate.inner, *(live.source.steps or ()))
            slopes = reachable_slopes(steps, live.weights)
            pairs = torch.stack([live.weights.double(), slopes.double()], dim=-1).reshape(1, -1, 2)
            self._put_all([gate], pairs, board)
        self._await(gate, live.node, live.source.key[1], board)

    def _await(self, gate: ResidualGate, node: Node, output: int, board: Board) -> None:
        """Measure the gradient at an output of a node, when it arrives."""
        if not gate.kind.startswith("gate"):
            return
        owner = weakref.ref(self)

        def arrived(gradients: Sequence[Tensor | None]) -> None:
            hooks, gradient = owner(), gradients[output]
            if hooks is not None and gradient is not None:
                hooks._arrived(gate, gradient, board)

        self._handles.append(node.register_prehook(arrived))

    @contained
    def _arrived(self, gate: ResidualGate, gradient: Tensor, board: Board) -> None:
        own = on_this_rank((gradient.detach(),))
        if own is not None:
            self._put(Tap.GATE_GRADIENT, self._gradients, [gate], own, board)

    def _put_all(self, gates: Sequence[ResidualGate], pairs: Tensor, board: Board) -> None:
        """Weights and slopes ``[gate, entry, 2]`` of several gates."""
        self._put(Tap.GATE, self._weights, gates, list(pairs.unbind()), board)

    def _put(
        self, tap: Tap, found: _Found, gates: Sequence[ResidualGate], tensors: Sequence[Tensor], board: Board
    ) -> None:
        for probe in self.probes:
            if probe.tap is not tap or not self.every(probe):
                continue
            try:
                views = [probe.view((t,), self._owner(g)) for g, t in zip(gates, tensors, strict=True)]
                seen = [(gate, view) for gate, view in zip(gates, views, strict=True) if view is not None]
                for terms in terms_of(probe) if seen else ():
                    slots = board.put_many(terms, [view[0] for _, view in seen])
                    for (gate, _), slot in zip(seen, slots, strict=True):
                        found.setdefault(gate.path, []).append({(probe.name, terms): slot})
            except Exception as error:  # one probe's fault costs the others nothing
                warn_once(self, error, probe.name)

    def _owner(self, gate: ResidualGate) -> nn.Module:
        """The module that holds a gate."""
        path = gate.module or (gate.parameter or gate.path.partition(":")[0]).rpartition(".")[0]
        return self._by_path.get(path) or self._by_path[""]

    def _called(self, tap: Tap, calls: Sequence[CallRecord]) -> Mapping[str, list[TermSlots]]:
        return {self._listened[site]: slots for site, slots in module_observations(tap, calls).items()}


def _always(_: Probe) -> bool:
    return True
