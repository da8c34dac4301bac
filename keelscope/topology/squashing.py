"""What lies between a learned number and the weight it becomes: sigmoid, clamp, softplus, a factor, a shift.

`keelscope.topology.coefficients` reads the steps from the graph of one forward; with them `keelscope.gates` computes
the weight and its slope anew on every later step, from the parameter alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import functional

from keelscope.topology.graph import Graph, Key

__all__ = ["Source", "Step", "Steps", "reachable_slopes", "settled", "squashed", "trace"]


class Step(NamedTuple):
    """One function of one number, with its constants."""

    name: str
    first: float = math.nan
    second: float = math.nan


Steps = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """The tensor that a learned weight is computed from, number by number."""

    origin: Key
    """The earliest tensor that leads to the weight number by number: weights with the same origin are one gate."""
    key: Key
    """The parameter, or what `module` put out; the weight itself where there is neither."""
    steps: Steps | None
    """From there to the weight, in the order of computing; None if they cannot be read."""
    module: str | None = None
    """Path of the module that put it out; None for a parameter."""
    inner: Steps | None = ()
    """The last steps inside that module, up to what it puts out; None if they cannot be read."""


def squashed(steps: Steps, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and their slopes, in the precision of the model.

    Args:
        steps: functions in the order of computing.
        raw: what they are applied to.

    Returns:
        The weights, and the size of the derivative of each by its raw number, constant factors left out.

    Example:
        >>> squashed((Step("clamp", 0.0, 1.0), Step("scale", 3.0)), torch.tensor([0.5, 2.0]))
        (tensor([1.5000, 3.0000]), tensor([1., 0.]))
    """
    slopes = torch.ones_like(raw)
    for name, *numbers in steps:
        raw, slope = _FUNCTIONS[name](raw, *numbers)
        slopes = slopes if slope is None else slopes * slope
    return raw, slopes


def reachable_slopes(steps: Steps | None, weights: Tensor) -> Tensor:
    """Slopes of weights as far as the weights alone tell them.

    Args:
        steps: functions in the order of computing, None if they are not known.
        weights: what they gave.

    Returns:
        As in `squashed`; NaN where it cannot be told (on the bound of a clamp: at it or beyond).

    Example:
        >>> reachable_slopes((Step("sigmoid"),), torch.tensor([0.5, 1.0]))
        tensor([0.2500, 0.0000])
    """
    for name, *numbers in reversed(steps or ()):
        slopes = _BACK.get(name, _unreachable)(weights, *numbers)
        if name == "scale":
            weights = weights / numbers[0]
        elif name == "shift":
            weights = weights - numbers[0]
        else:
            others = [step for step in steps or () if step.name not in {"scale", "shift", name}]
            return slopes if not others else torch.full_like(weights, math.nan)
    return torch.full_like(weights, math.nan if steps is None else 1.0)


def trace(
    graph: Graph, key: Key, maker: Callable[[Key], str | None], constant: Callable[[int, int, str], float | None]
) -> Source:
    """Follow a weight back, number by number.

    Args:
        graph: the graph.
        key: the weight.
        maker: the module that put a tensor out, if it put out nothing else.
        constant: the number that a node keeps, by node, input and attribute; None if it is none.

    Returns:
        Where it comes from.
    """
    steps: list[Step] = []
    current, made, outer = key, None, 0
    while graph.leaf(current) is None:
        if made is None and maker(current) is not None:
            made, outer = current, len(steps)
        found = _steps(graph, current[0], constant)
        if found is None:
            return _without_leaf(graph, key, current, made, steps, outer, maker)
        current = found[0]
        steps += reversed(found[1])
    return Source(current, current, tuple(reversed(steps)))


def settled(steps: Steps | None, raw: Tensor | None, weights: Tensor | None) -> Steps | None:
    """Steps that give the weights, with a number that is added at last and kept nowhere.

    Args:
        steps: as they were read.
        raw: the number before them.
        weights: the number after them, in any shape.

    Returns:
        The steps; None if they cannot be completed, or give something else.
    """
    if steps is None or any(step.name == "shift" for step in steps[:-1]):
        return None
    is_open = bool(steps) and steps[-1].name == "shift"
    if raw is None or weights is None or raw.numel() != weights.numel():
        return None if is_open else steps
    known, _ = squashed(steps[:-1] if is_open else steps, raw.detach())
    gap = weights.reshape(-1).double() - known.reshape(-1).double()
    by = float(gap.mean()) if is_open else 0.0
    size = max(1e-30, float(weights.abs().max()))
    if not bool(((gap - by).abs() <= 1e-2 * size).all()):  # casts to a narrow type lie between
        return None
    return (*steps[:-1], Step("shift", by)) if is_open else steps


def _without_leaf(
    graph: Graph,
    key: Key,
    origin: Key,
    made: Key | None,
    steps: Sequence[Step],
    outer: int,
    maker: Callable[[Key], str | None],
) -> Source:
    """A weight that several numbers lead to."""
    is_sum = graph.is_heavy(origin[0]) or graph.names[origin[0]] in {"Add", "Sub", "Sum", "Mean"}
    inner = tuple(reversed(steps[outer:])) if is_sum else None
    if made is None:
        return Source(origin, key, None, None, inner)
    return Source(origin, made, tuple(reversed(steps[:outer])), maker(made), inner)


def _steps(
    graph: Graph, index: int, constant: Callable[[int, int, str], float | None]
) -> tuple[Key, list[Step]] | None:
    """The only input of a node and what the node does to it; None if it has several or does something else."""
    name, inputs = graph.names[index], graph.inputs[index]
    slots = [slot for slot, key in enumerate(inputs) if key is not None]
    if len(slots) != 1:
        return None
    slot = slots[0]
    source = inputs[slot]
    assert source is not None
    if graph.is_transparent(index) or name == "Select":
        return source, []
    if name in {"Mul", "Div"}:
        number = constant(index, 1 - slot, "_saved_self" if slot else "_saved_other")
        if number is None or number == 0 or (name == "Div" and slot):
            return None
        return source, [Step("scale", 1 / number if name == "Div" else number)]
    step = _STEPS.get(name)
    found = None if step is None else step(graph.nodes[index], slot)
    return None if found is None else (source, found)


def _number(node: Node, name: str, otherwise: float = math.nan) -> float:
    """A plain number that a node keeps; a saved tensor is none."""
    if hasattr(node, name.replace("_saved", "_raw_saved")):
        return math.nan
    value = getattr(node, name, None)
    return float(value) if isinstance(value, int | float) else otherwise if value is None else math.nan


def _bounded(low: str, high: str) -> Callable[[Node, int], list[Step] | None]:
    def read(node: Node, _: int) -> list[Step] | None:
        step = Step("clamp", _number(node, low, -math.inf), _number(node, high, math.inf))
        return None if math.isnan(step.first) or math.isnan(step.second) else [step]

    return read


def _shifted(sign: float, scaled: int) -> Callable[[Node, int], list[Step] | None]:
    """A sum with a number that no node keeps; one of its inputs is scaled by alpha."""

    def read(node: Node, slot: int) -> list[Step] | None:
        factor = sign * _number(node, "_saved_alpha", 1.0) if slot == scaled else 1.0
        return [*([] if factor == 1 else [Step("scale", factor)]), Step("shift")]

    return read


_STEPS: dict[str, Callable[[Node, int], list[Step] | None]] = {
    "Sigmoid": lambda _node, _slot: [Step("sigmoid")],
    "Tanh": lambda _node, _slot: [Step("tanh")],
    "Exp": lambda _node, _slot: [Step("exp")],
    "Relu": lambda _node, _slot: [Step("relu")],
    "Abs": lambda _node, _slot: [Step("abs")],
    "Hardsigmoid": lambda _node, _slot: [Step("hardsigmoid")],
    "Neg": lambda _node, _slot: [Step("scale", -1.0)],
    "Softplus": lambda node, _slot: [
        Step("softplus", _number(node, "_saved_beta", 1.0), _number(node, "_saved_threshold", 20.0))
    ],
    "Clamp": _bounded("_saved_min", "_saved_max"),
    "ClampMin": _bounded("_saved_min", ""),
    "ClampMax": _bounded("", "_saved_max"),
    "Hardtanh": _bounded("_saved_min_val", "_saved_max_val"),
    "Rsub": _shifted(-1.0, 0),
    "Add": _shifted(1.0, 1),
    "Sub": _shifted(-1.0, 1),
}
"""What nodes with one input do; each gives steps in the order of computing."""


def _sigmoid(x: Tensor, *_: float) -> tuple[Tensor, Tensor]:
    y = x.sigmoid()
    return y, y * (1 - y)


def _clamp(x: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return x.clamp(low, high), ((x >= low) & (x <= high)).to(x.dtype)


_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {
    "sigmoid": _sigmoid,
    "tanh": lambda x, *_: (x.tanh(), 1 - x.tanh().square()),
    "exp": lambda x, *_: (x.exp(), x.exp()),
    "relu": lambda x, *_: (x.relu(), (x > 0).to(x.dtype)),
    "abs": lambda x, *_: (x.abs(), (x != 0).to(x.dtype)),
    "hardsigmoid": lambda x, *_: (functional.hardsigmoid(x), ((x > -3) & (x < 3)).to(x.dtype) / 6),
    "softplus": lambda x, beta, limit: (functional.softplus(x, beta, limit), (beta * x).sigmoid()),
    "clamp": _clamp,
    "scale": lambda x, factor, _: (x * factor, None),
    "shift": lambda x, by, _: (x + by, None),
}


def _unreachable(y: Tensor, *_: float) -> Tensor:
    return torch.full_like(y, math.nan)


_BACK: dict[str, Callable[..., Tensor]] = {
    "sigmoid": lambda y, *_: y * (1 - y),
    "tanh": lambda y, *_: 1 - y.square(),
    "exp": lambda y, *_: y,
    "relu": lambda y, *_: (y > 0).to(y.dtype),
    "abs": lambda y, *_: (y != 0).to(y.dtype),
    "softplus": lambda y, beta, _: -torch.expm1(-beta * y),
    "clamp": lambda y, low, high: torch.where((y > low) & (y < high), 1.0, math.nan).to(y.dtype),
    "scale": _unreachable,
    "shift": _unreachable,
}
