"""The numbers behind `keelscope.gates`: weights and slopes, from parameters or from what a module puts out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from keelscope.entries import stored
from keelscope.probe import Probe, Tap, TensorProbe, Tensors
from keelscope.topology.gates import ResidualGate
from keelscope.topology.squashing import Steps, reachable_slopes, squashed

__all__ = ["flat_copies", "from_parameter", "pairs_of_output", "stand_ins"]


def stand_ins(gate: ResidualGate, probes: Sequence[Probe]) -> list[Probe]:
    """Probes to be shown what the module of a gate puts out, and the gradient there.

    Args:
        gate: a gate with a module.
        probes: of gates.

    Returns:
        Probes of modules, under the same names.
    """
    found: list[Probe] = []
    for probe in probes:
        if probe.tap is Tap.GATE:
            view = _weights_of_output(probe, gate.steps, gate.inner)
            found.append(TensorProbe(probe.name, Tap.OUTPUT, probe.statistics, every=probe.every, views=view))
        elif gate.kind.startswith("gate"):
            tap = Tap.OUTPUT_GRADIENT
            found.append(TensorProbe(probe.name, tap, probe.statistics, every=probe.every, views=probe.view))
    return found


def from_parameter(gate: ResidualGate, raw: Tensor) -> Tensors:
    """Weights of gates made of parameters alike.

    Args:
        gate: one of the gates.
        raw: the numbers of all of them.

    Returns:
        Weights and slopes; NaN for slopes that are not known or where nothing is learned.
    """
    if gate.steps is None or not gate.kind.startswith("learnable"):
        return raw, torch.full_like(raw, torch.nan)
    return squashed(gate.steps, raw)


def _weights_of_output(
    probe: Probe, steps: Steps | None, inner: Steps | None
) -> Callable[[Tensors, nn.Module], Tensors | None]:
    """A probe's view of weights and slopes, made of what a module puts out."""

    def view(tensors: Tensors, owner: nn.Module) -> Tensors | None:
        return probe.view((pairs_of_output(steps, inner, tensors[0]),), owner)

    return view


def pairs_of_output(steps: Steps | None, inner: Steps | None, output: Tensor) -> Tensor:
    """The weights of a gate that a module puts out.

    Args:
        steps: from the output to the weight, None if they are not known.
        inner: the last steps inside the module, None if they are not known.
        output: what the module put out.

    Returns:
        Weights and slopes ``[entry, 2]``.
    """
    output = stored(output.detach())
    before = reachable_slopes(inner, output)
    weights, slopes = (output, before * torch.nan) if steps is None else squashed(steps, output)
    return torch.stack([weights.double(), (slopes * before).double()], dim=-1)


def flat_copies(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Flat copies, with one operation for all tensors of one type and device.

    Args:
        tensors: flat tensors by any number.

    Returns:
        The copies by the same number.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in tensors.items():
        groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    copies: dict[int, Tensor] = {}
    for several in groups.values():
        whole = torch.cat([tensors[i] for i in several])
        copies |= dict(zip(several, torch.split(whole, [tensors[i].numel() for i in several]), strict=True))
    return copies
