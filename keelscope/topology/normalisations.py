"""Normalisations in an autograd graph, each crossed in one step: modules, fused operations, norms written in pieces.

`keelscope.topology` reports the calls of modules; what happened between the input and the output of a norm module
belongs to it, however it is written. Outside such modules a fused node is a norm by its name, and a product is a norm
if its smaller operand is the root of a mean, variance or length of the larger one.
"""

from __future__ import annotations

from collections.abc import Sequence

from keelscope.topology.graph import Graph, Key
from keelscope.topology.module_calls import ModuleCall, Surroundings, interior
from keelscope.topology.terms import Norm, Terms

__all__ = ["find_norms"]

_ROOTS = frozenset({"Rsqrt", "Sqrt", "LinalgVectorNorm", "Norm"})
_REDUCTIONS = frozenset({"Mean", "Sum", "Var", "Std", "VarMean", "LinalgVectorNorm", "Norm"})
_LONGEST = 12


def find_norms(terms: Terms, norms: dict[Key, Norm], calls: Sequence[ModuleCall]) -> set[int]:
    """Fill in every norm of a graph.

    Args:
        terms: the graph and how to take it apart.
        norms: gets a norm per output tensor; `terms` looks at the same mapping.
        calls: the module calls in the order in which they ended.

    Returns:
        Nodes that lie inside norms.
    """
    inside: set[int] = set()
    modules = [call for call in calls if call.kind == "norm" and call.outputs]
    for call in modules:
        source = call.inputs[0] if call.inputs else None
        if source != call.outputs[0]:
            inside |= interior(terms.graph, call)
            norms[call.outputs[0]] = Norm(call.path, source)
    _fused(terms, norms, inside)
    _written_in_pieces(terms, norms, inside, {key for call in calls for key in call.outputs})
    for call in calls:
        if not call.kind and call.inputs and call.outputs:
            _by_behaviour(terms, norms, call)
    _name(terms.graph, norms, calls)
    return inside


def _fused(terms: Terms, norms: dict[Key, Norm], inside: set[int]) -> None:
    for index in range(len(terms.graph.nodes)):
        if terms.graph.is_norm(index) and index not in inside:
            norms.setdefault((index, 0), Norm("", terms.graph.inputs[index][0]))


def _written_in_pieces(terms: Terms, norms: dict[Key, Norm], inside: set[int], outputs: set[Key]) -> None:
    """``x * rsqrt(mean(x^2) + eps)`` and its relatives, with a gain and a bias that follow in the same module."""
    graph = terms.graph
    for index, name in enumerate(graph.names):
        if (
            name not in {"Mul", "Div"}
            or index in inside
            or (index, 0) in norms
            or len(set(graph.inputs[index]) - {None}) < 2
        ):
            continue
        source = _normalised(terms, index)
        if source is None:
            continue
        key: Key | None = (index, 0)
        while key is not None and key not in norms:
            norms[key] = Norm("", source)
            key = None if key in outputs else _with_gain(terms, key)


def _normalised(terms: Terms, index: int) -> Key | None:
    """What a product normalises, if its weight is computed from the tensor it scales."""
    graph = terms.graph
    carried = terms.scale(index)
    if carried is None or not carried[1]:
        return None
    weight = graph.inputs[index][carried[1][0].slot]
    centred = _centred(graph, carried[0])
    origins = {graph.origin(carried[0]), graph.origin(centred)}
    return centred if weight is not None and _is_size_of(graph, weight, origins) else None


def _centred(graph: Graph, key: Key) -> Key:
    """X where the tensor is x minus its mean."""
    origin = graph.origin(key)
    first, second = (*graph.inputs[origin[0]], None, None)[:2]
    if graph.names[origin[0]] == "Sub" and first is not None and second is not None:
        mean = graph.origin(second)
        if graph.names[mean[0]] == "Mean" and graph.inputs[mean[0]][0] is not None:
            return first
    return key


def _is_size_of(graph: Graph, key: Key, origins: set[Key]) -> bool:
    """Whether a tensor is the root of a mean, variance or length of one of some tensors."""
    rooted = reduced = False
    queue, seen = [key], {key}
    for current in queue:
        if graph.origin(current) in origins:
            return rooted and reduced
        if len(queue) > _LONGEST or graph.is_heavy(current[0]):
            return False
        rooted |= graph.names[current[0]] in _ROOTS or _is_root_power(graph, current[0])
        reduced |= graph.names[current[0]] in _REDUCTIONS
        fresh = [source for source in graph.inputs[current[0]] if source is not None and source not in seen]
        seen.update(fresh)
        queue.extend(fresh)
    return False


def _is_root_power(graph: Graph, index: int) -> bool:
    """Whether a node is ``x ** p`` with p < 1 (a number, so that no saved tensor is read)."""
    exponent = graph.plain(index, "_saved_exponent", 2) if graph.names[index] == "Pow" else 2
    return isinstance(exponent, int | float) and exponent < 1


def _with_gain(terms: Terms, key: Key) -> Key | None:
    """The tensor after a gain, bias or cast that is the only reader of a norm's output."""
    graph = terms.graph
    readers = graph.readers[key]
    if len(readers) != 1 or graph.names[readers[0]] not in {"Mul", "Add", "ToCopy"}:
        return None
    others = [source for source in graph.inputs[readers[0]] if source not in {key, None}]
    learned = all(source is not None and terms.is_parameter(source) for source in others)
    return (readers[0], 0) if learned and (others or graph.names[readers[0]] == "ToCopy") else None


def _by_behaviour(terms: Terms, norms: dict[Key, Norm], call: ModuleCall) -> None:
    """A module without children that only scales and shifts a norm of its input, or a tanh of its scaled input."""
    graph = terms.graph
    key, source = call.outputs[0], call.inputs[0]
    kind = ""
    for _ in range(_LONGEST):
        if graph.origin(key) == graph.origin(source):
            if kind:
                for index in interior(graph, call):
                    norms.pop((index, 0), None)
                norms[call.outputs[0]] = Norm(call.path, source, kind)
            return
        norm = norms.get(key)
        step = terms.scale(key[0])
        if norm is not None and norm.source is not None:
            key, kind = norm.source, "n"
        elif graph.names[key[0]] == "Tanh" and graph.inputs[key[0]][0] is not None and not kind:
            key, kind = _only(graph, key), "d"
        elif step is not None:
            key = step[0]
        else:
            return


def _only(graph: Graph, key: Key) -> Key:
    source = graph.inputs[key[0]][0]
    return key if source is None else source


def _name(graph: Graph, norms: dict[Key, Norm], calls: Sequence[ModuleCall]) -> None:
    """Norms outside norm modules are named after the module around them: ``blocks.0:norm``."""
    around = Surroundings(calls)
    names: dict[Norm, str] = {}
    for key, norm in sorted(norms.items()):
        if not norm.path:
            name = names.setdefault(norm, f"{around.path(graph, key[0])}:norm")
            norms[key] = Norm(name, norm.source, norm.kind)
