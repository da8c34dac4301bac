"""Gradient norms of every parameter and every module output of real models, against float64 without hooks.

The oracle is a float64 copy of the model, its outputs held by hand and differentiated by one `torch.autograd.grad`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import keelscope as ks
from keelscope.oneshot import record_once

RELATIVE, FLOOR = 1e-5, 1e-6


@dataclass
class Oracle:
    """Norms by path, in float64."""

    parameters: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    """Root mean square of outputs; NaN for a module called more than once."""
    loss: float = math.nan


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from [value] if value.is_floating_point() else []
    elif isinstance(value, Mapping):
        for child in value.values():
            yield from tensors(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from tensors(child)


def widened(batch: object) -> object:
    if isinstance(batch, dict):
        return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    return tuple(value.double() if value.is_floating_point() else value for value in batch)


def oracle(case, model: nn.Module) -> Oracle:
    twin = copy.deepcopy(model).double()
    for module in twin.modules():
        if getattr(module, "inplace", False):
            module.inplace = False
    calls = hold_outputs(twin)
    loss = case.run(twin, widened(case.batch))
    named = [(name, p) for name, p in twin.named_parameters() if p.requires_grad]
    leaves = [leaf for call in calls for leaf in call.leaves]
    gradients = torch.autograd.grad(loss, [*(p for _, p in named), *leaves], allow_unused=True)
    found = Oracle(loss=loss.item())
    for (name, _), gradient in zip(named, gradients, strict=False):
        if gradient is not None:
            found.parameters[name] = gradient.norm().item()
    of_outputs = iter(gradients[len(named) :])
    for call in calls:
        reached = [g for g in [next(of_outputs) for _ in call.leaves] if g is not None]
        if reached:
            found.outputs[call.path] = math.hypot(found.outputs.get(call.path, 0.0), reached[0].norm().item())
            found.sizes[call.path] = call.size if call.path not in found.sizes else math.nan
    return found


@dataclass(frozen=True)
class HeldCall:
    path: str
    leaves: list[Tensor]
    size: float


def hold_outputs(model: nn.Module) -> list[HeldCall]:
    """Every output tensor of every call of every module, in a list that the next forward fills."""
    calls: list[HeldCall] = []
    paths = {id(module): path for path, module in model.named_modules()}

    def hold(module: nn.Module, _: object, output: object) -> None:
        leaves = list(tensors(output))
        if leaves:
            size = leaves[0].detach().square().mean().sqrt().item()
            calls.append(HeldCall(paths[id(module)], [leaf for leaf in leaves if leaf.requires_grad], size))

    for module in model.modules():
        module.register_forward_hook(hold)
    return calls


def compare(series: ks.Series, step: int, wanted: dict[str, float]) -> float:
    """Worst relative error of norms above the floor; every site the oracle knows must be there and no other."""
    row = dict(zip((site.path for site in series.sites), series.at(step), strict=True))
    observed = {path for path, value in row.items() if not math.isnan(value)}
    assert observed == set(wanted)
    floor = FLOOR * max(wanted.values())
    small = [path for path in observed if wanted[path] <= floor]
    assert all(row[path] <= 2 * floor for path in small)
    return max(float(abs(row[path] / wanted[path] - 1)) for path in observed if wanted[path] > floor)


def check(run: ks.Run, step: int, found: Oracle) -> dict[str, float]:
    errors = {
        "parameters": compare(run["parameter_gradients/norm"], step, found.parameters),
        "outputs": compare(run["gradients/norm"], step, found.outputs),
    }
    assert max(errors.values()) < RELATIVE, errors
    assert run["scalars/loss"].at(step) == pytest.approx(found.loss, rel=1e-5)
    sizes = dict(zip((site.path for site in run["outputs/rms"].sites), run["outputs/rms"].at(step), strict=True))
    for path, size in found.sizes.items():
        assert math.isnan(size) or sizes[path] == pytest.approx(size, rel=1e-4), path
    total = math.sqrt(sum(norm**2 for norm in found.parameters.values()))
    assert run["scalars/grad_norm_total"].at(step) == pytest.approx(total, rel=RELATIVE)
    return errors


def test_one_forward_and_backward(case):
    before = {name: p.detach().clone() for name, p in case.model.state_dict().items()}
    run = record_once(case.model, case.batch, case.loss, sites="all")
    errors = check(run, 0, oracle(case, case.model))
    print(f"worst relative error: {errors}")  # noqa: T201 - shown by -s
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())


def test_training_loop_to_file(case, tmp_path):
    """Two steps of a real loop, read back from the run file."""
    model, found = case.model, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with ks.watch(model, tmp_path / "run.h5", optimizer=optimizer, sites="all") as watch:
        for _ in range(2):
            found.append(oracle(case, model))
            optimizer.zero_grad()
            loss = case.run(model, case.batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            watch.log(loss=loss)
    with ks.open_run(tmp_path / "run.h5") as run:
        for step in range(2):
            check(run, step, found[step])
        statuses = {entry.status for entry in run.coverage if entry.what == "parameter"}
        assert statuses <= {"observed", "disconnected", "never_called"}
        assert np.array_equal(run["gradients/norm"].steps, [0, 1])
