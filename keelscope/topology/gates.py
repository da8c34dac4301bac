"""Every learned or fixed weight on shortcut, branch and branch input of residual sub-layers, as one list.

Gates are found in the topology, by well-known names, and where a module declares them with an attribute or method
``residual_gates``: paths of parameters, buffers or modules (whose output is the gate), relative to the module::

    class Block(nn.Module):
        residual_gates = ("gate",)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from keelscope.sites import SitePlan, WatchedParameter, clean_path, is_norm
from keelscope.topology.coefficients import Coefficient
from keelscope.topology.records import Sublayer, Topology
from keelscope.topology.squashing import Source, Steps

__all__ = ["ResidualGate", "declared_gates", "find_gates", "is_small", "paths_by_sublayer"]

_NAMES = re.compile(r"resweight|res_weight|skipinit_gain|rezero\w*|re_zero\w*|layer_?scale\w*|(gamma|lambda)_?[12]")
_NAMES_IN_BLOCKS = frozenset({"alpha", "skip_gain", "residual_weight", "residual_scale", "residual_gate"})
"""Names that mean other things in leaf modules (activations)."""
_NAMES_IN_SCALES = frozenset({"gamma", "scale", "weight", "lambda1"})
"""Names in classes like LayerScale."""


@dataclass(frozen=True, slots=True)
class ResidualGate:
    """One gate or residual weight."""

    path: str
    """The parameter, buffer or module, else the sub-layer with the place of the weight: ``blocks.0.attn:alpha``."""
    kind: str
    """learnable scalar, learnable vector, gate (token), buffer or constant."""
    parameter: str | None = None
    """The parameter or buffer it is computed from."""
    module: str | None = None
    """The module whose output is to be looked at; None where the parameter says all."""
    steps: Steps | None = None
    """From the parameter, or from the module's output, to the weight; None if they are not known."""
    inner: Steps | None = None
    """The last steps inside the module; None if they are not known."""
    value: float | None = None
    """The weight, where it is a constant."""
    sublayers: tuple[int, ...] = ()
    """Indices of the sub-layers that it weighs in."""
    source: Source | None = None
    """Where the graph of the first look has it."""

    @property
    def is_fleeting(self) -> bool:
        """Whether only the graph of the first look shows it: it depends on data, and no module puts it out."""
        return self.kind.startswith("gate") and self.module is None

    @property
    def is_raw(self) -> bool:
        """Whether what is recorded is the parameter or output itself, since the weight made of it is not known."""
        return self.steps is None and self.value is None


def find_gates(topology: Topology | None, plan: SitePlan) -> tuple[ResidualGate, ...]:
    """Every gate of a model: those of sub-layers in execution order, then declared ones, then those found by name.

    Args:
        topology: the sub-layers, or None.
        plan: modules and parameters of the model.

    Returns:
        The gates, with distinct paths. Stack entries without a sub-layer of their own (the first one on input that
        needs no gradient) have the gates that entries of the same class have.
    """
    found = _of_topology(topology) if topology is not None else []
    found += _alike(found, topology, plan) if topology is not None else []
    for gate in (*declared_gates(plan), *_by_name(plan)):
        known = {path for other in found for path in (other.path, other.parameter, other.module)}
        if gate.path not in known and (gate.parameter is None or gate.parameter not in known):
            found.append(gate)
    sizes = {watched.site.path: watched.site.numel for watched in plan.parameters}
    single = [gate.kind == "learnable vector" and sizes.get(gate.parameter or "") == 1 for gate in found]
    return tuple(replace(g, kind="learnable scalar") if one else g for g, one in zip(found, single, strict=True))


def is_small(parameter: Tensor) -> bool:
    """Whether a parameter has the shape of a residual weight: one number, or one per feature."""
    return not isinstance(parameter, UninitializedParameter) and sum(size != 1 for size in parameter.shape) <= 1


def _of_topology(topology: Topology) -> list[ResidualGate]:
    names = [sublayer.branch or sublayer.site or "sublayer" for sublayer in topology.sublayers]
    gates: dict[str, ResidualGate] = {}
    for sublayer in (*topology.sublayers, *topology.further):
        index = sublayer.index if sublayer.stream >= 0 else sublayer.part_of
        if index is None or index >= len(names):
            continue
        name = names[index] if names.count(names[index]) == 1 else f"{names[index]}@{index}"
        for gate in _of_sublayer(sublayer, index, name):
            known = gates.setdefault(gate.path, gate)
            if index not in known.sublayers:
                gates[gate.path] = replace(known, sublayers=(*known.sublayers, index))
    return list(gates.values())


def _alike(found: Sequence[ResidualGate], topology: Topology, plan: SitePlan) -> Iterator[ResidualGate]:
    """The gates of found ones' counterparts in stack entries that the graph shows nothing of."""
    modules = dict(plan.everything)
    inside = [path for s in topology.sublayers for path in (*s.branch_sites, s.branch, s.site) if path]
    seen = {plan.place(path) for path in inside}
    unseen = [(path, place) for path, place in plan.entries.items() if place not in seen]
    paths = {gate.path for gate in found}
    shapes = {watched.site.path: watched.parameter.shape for watched in plan.parameters} if unseen else {}
    for gate in found if unseen else ():
        around = next((p for p in _parents(gate.module or gate.parameter or "") if p in plan.entries), "")
        for path, (stack, _) in unseen if around else ():
            if stack != plan.entries[around][0] or type(modules.get(path)) is not type(modules.get(around)):
                continue
            moved = _moved(gate, around, path)
            exists = (shapes if moved.module is None else modules).get(moved.module or moved.parameter or "")
            if exists is not None and moved.path not in paths:
                paths.add(moved.path)
                yield moved


def _parents(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _moved(gate: ResidualGate, around: str, path: str) -> ResidualGate:
    """A gate of one stack entry in another."""

    def move(place: str | None) -> str | None:
        return path + place[len(around) :] if place is not None and place.startswith(f"{around}.") else place

    places = move(gate.path), move(gate.parameter), move(gate.module)
    return replace(gate, path=places[0] or gate.path, parameter=places[1], module=places[2], sublayers=(), source=None)


def _of_sublayer(sublayer: Sublayer, index: int, name: str) -> Iterator[ResidualGate]:
    """The gates of one sub-layer; weights of the same origin (T and 1 - T) are one."""
    weights = {"alpha": sublayer.alpha, "beta": sublayer.beta, "entry": sublayer.entry}
    parts = [part for weight in weights.values() for part in weight.parts or (weight,)]
    origins: dict[object, list[Coefficient]] = {}
    for part in parts:
        if part.kind not in {"one", "constant", "unknown"}:
            origin = part.source.origin if part.source is not None else part.parameter
            origins.setdefault(origin, []).append(part)
    for several in origins.values():
        gate = _of_coefficient(min(several, key=_indirectness), index, name)
        if gate.parameter or gate.module or gate.kind.startswith("gate"):
            yield gate
    for place, weight in weights.items():
        if weight.kind == "constant" and not sublayer.is_declared:
            yield ResidualGate(f"{name}:{place}", "constant", value=weight.value, sublayers=(index,))


def _indirectness(weight: Coefficient) -> tuple[bool, int]:
    steps = weight.source.steps if weight.source is not None else None
    return steps is None, len(steps or ())


def _of_coefficient(weight: Coefficient, index: int, name: str) -> ResidualGate:
    source, parameter = weight.source, weight.parameter
    parameter = None if parameter is None else clean_path(parameter)
    if source is None:  # a buffer, or declared
        steps: Steps | None = () if weight.kind == "buffer" else None
        return ResidualGate(parameter or name, weight.kind, parameter, steps=steps, sublayers=(index,))
    module = source.module
    by_module = weight.depends_on_data and module is not None
    path = module if by_module else parameter
    return ResidualGate(
        path or f"{name}:gate",
        weight.kind,
        parameter,
        module,
        source.steps,
        source.inner,
        sublayers=(index,),
        source=source,
    )


def declared_gates(plan: SitePlan) -> list[ResidualGate]:
    """Gates that modules declare; a declaration that cannot be used counts as none.

    Args:
        plan: modules and parameters of the model.

    Returns:
        The gates, each path once.

    Example:
        >>> from keelscope.sites import plan_sites
        >>> class Block(nn.Linear):
        ...     residual_gates = ("bias",)
        >>> [(gate.path, gate.kind) for gate in declared_gates(plan_sites(nn.Sequential(Block(2, 2))))]
        [('0.bias', 'learnable vector')]
    """
    gates: dict[str, ResidualGate] = {}
    for path, module in plan.everything:
        for relative in _names(module):
            gate = _declared(path, module, relative)
            if gate is not None:
                gates.setdefault(gate.path, gate)
    return list(gates.values())


def _names(module: nn.Module) -> list[str]:
    declared = getattr(module, "residual_gates", None)
    try:
        items = declared() if callable(declared) else declared
        return [items] if isinstance(items, str) else [str(item) for item in items or ()]
    except Exception:  # the user's own code
        return []


def _declared(path: str, owner: nn.Module, relative: str) -> ResidualGate | None:
    full = ".".join(part for part in (path, clean_path(relative)) if part)
    prefix, _, name = relative.rpartition(".")
    try:
        holder = owner.get_submodule(prefix)
    except AttributeError:
        return None
    tensor = holder._parameters.get(name)
    if tensor is not None:
        return ResidualGate(full, _kind(tensor), full)
    if holder._buffers.get(name) is not None:
        return ResidualGate(full, "buffer", full, steps=())
    return _declared_module(full, holder._modules.get(name))


def _declared_module(path: str, module: nn.Module | None) -> ResidualGate | None:
    """A module whose output is the gate: learned as a whole if all of its parameters are small and single."""
    if module is None:
        return None
    parameters = list(module.named_parameters())
    if len(parameters) != 1 or not is_small(parameters[0][1]):
        return ResidualGate(path, "gate (token)", module=path, steps=())
    name, parameter = parameters[0]
    return ResidualGate(f"{path}.{name}", _kind(parameter), f"{path}.{name}", path, steps=())


def _kind(parameter: nn.Parameter) -> str:
    if not parameter.requires_grad:
        return "buffer"
    return "learnable scalar" if parameter.numel() == 1 else "learnable vector"


def _by_name(plan: SitePlan) -> Iterable[ResidualGate]:
    """Parameters that are called like residual weights, and have the shape of one."""
    modules: Mapping[str, nn.Module] = dict(plan.everything)
    for watched in plan.parameters:
        path = watched.site.path
        if is_small(watched.parameter) and not is_norm(watched.owner) and _is_called_so(watched, path, modules):
            yield ResidualGate(path, _kind(watched.parameter), path)


def _is_called_so(watched: WatchedParameter, path: str, modules: Mapping[str, nn.Module]) -> bool:
    name, owner = path.rpartition(".")[2], watched.owner
    if _NAMES.fullmatch(name):
        return True
    kind = type(owner).__name__.lower()
    if "layerscale" in kind or "layer_scale" in kind or "rezero" in kind or "skipinit" in kind:
        return name in _NAMES_IN_SCALES or name in _NAMES_IN_BLOCKS
    is_block = any(True for _ in owner.children())
    return is_block and name in _NAMES_IN_BLOCKS and _is_repeated(path, modules)


def _is_repeated(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the owner is one of several like it, as blocks are."""
    owner = modules.get(path.rpartition(".")[0])
    return owner is not None and sum(type(module) is type(owner) for module in modules.values()) > 1


def paths_by_sublayer(gates: Sequence[ResidualGate]) -> dict[int, tuple[str, ...]]:
    """Index of a sub-layer -> paths of its gates."""
    found: dict[int, list[str]] = {}
    for gate in gates:
        for index in gate.sublayers:
            found.setdefault(index, []).append(gate.path)
    return {index: tuple(paths) for index, paths in found.items()}
