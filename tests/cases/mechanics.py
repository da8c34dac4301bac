"""Checks that run a case again, in another way than a plain watch: with and without one, twice, copied, in a file."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from adapter import observe
from facts import NUMERIC, differences, uncovered
from observation import close, watched
from torch import nn

import keelscope as ks


def steps_of(case: ModuleType) -> int:
    return getattr(case, "N_STEPS", 1)


def numbers(case: ModuleType) -> list[str]:
    model, step = case.build()
    if getattr(case, "EXPECT", {}).get("step_raises"):
        return []
    got = observe(case, model, step, steps_of(case))
    return differences(case, got)


def oracle(case: ModuleType) -> list[str]:
    """Every number of EXPECT is what the case's own float64 computation, without any tool, comes to."""
    want = {key: case.EXPECT[key] for key in (*NUMERIC, "evidence") if key in case.EXPECT}
    computed = plain(case.oracle())
    return uncovered(want, computed) + differences(case, computed, keys=(*NUMERIC, "evidence"), tolerance=(1e-6, 1e-12))


def plain(value: Any) -> Any:
    """Tensors as numbers, inside any nesting."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.item() if isinstance(value, torch.Tensor) else value


def hooks(case: ModuleType) -> list[str]:
    """Nothing of ours stays, nothing of the user's goes; the mode is as it was."""
    model, step = case.build()
    step_or_raise(case, model, step)  # lazy modules get their class and hooks of their own
    model, step = case.build()
    before = hook_counts(model)
    modes = [module.training for module in model.modules()]
    with contextlib.suppress(Exception), watched(case, model, step) as watch:
        for _ in range(steps_of(case)):
            step(model)
            watch.step()
    twin, twin_step = case.build()
    step_or_raise(case, twin, twin_step)
    found = []
    if hook_counts(model) != hook_counts(twin):
        found.append(f"hooks {before} before, {hook_counts(model)} after, {hook_counts(twin)} without a watch")
    if [module.training for module in model.modules()] != [module.training for module in twin.modules()] != modes:
        found.append("a mode changed")
    return found


def step_or_raise(case: ModuleType, model: nn.Module, step: Callable[[nn.Module], Any]) -> None:
    with contextlib.suppress(Exception):
        for _ in range(steps_of(case)):
            step(model)


def hook_counts(model: nn.Module) -> list[int]:
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    modules = [sum(len(getattr(m, name, None) or ()) for m in model.modules()) for name in names]
    tensors = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return modules + [sum(len(getattr(p, name, None) or ()) for p in model.parameters()) for name in tensors]


def identity(case: ModuleType) -> list[str]:
    """Losses, weights, gradients, buffers and random state of three steps are those without a watch, bit for bit."""
    outcomes = [outcome(case, watch=watch) for watch in (False, True)]
    tolerance = case.EXPECT.get("behaviour", {}).get("loss_atol", 0.0)
    return [
        f"{name}: {b} instead of {a}"
        for (name, a), (_, b) in zip(*outcomes, strict=True)
        if not torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True)
    ][:3]


def outcome(case: ModuleType, *, watch: bool) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(1)
    model, step = case.build()
    torch.manual_seed(1)
    session = watched(case, model, step) if watch else None
    losses = []
    for _ in range(max(3, steps_of(case))):
        try:
            losses.append(step(model))
        except Exception as error:  # some cases raise by design: the same must come through
            losses.append(float(len(str(error))))
        if session is not None:
            session.step()
    if session is not None:
        session.close()
    found = [("loss", torch.tensor([float("nan") if loss is None else float(loss) for loss in losses]))]
    for name, p in model.named_parameters():
        found.append((name, whole(p)))
        if p.grad is not None:
            found.append((f"{name}.grad", whole(p.grad)))
    found += [(name, whole(b)) for name, b in model.named_buffers()]
    return [*found, ("random state", torch.get_rng_state().double())]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()


def memory(case: ModuleType) -> list[str]:
    """Constant live tensors after warm-up, and the model can be freed."""
    growth, model = trained(case)
    gc.collect()
    found = [f"{growth} more live tensors after 20 steps"] if growth else []
    return found + (["the model is kept alive"] if model() is not None else [])


def trained(case: ModuleType) -> tuple[int, weakref.ref[nn.Module]]:
    model, step = case.build()

    def live(steps: int) -> int:
        for _ in range(steps):
            step(model)
            watch.step()
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    with watched(case, model, step) as watch:
        live(3)
        return -live(1) + live(20), weakref.ref(model)


def twice(case: ModuleType) -> list[str]:
    """Watched two times over: each call counts once, and both go without a trace."""
    model, step = case.build()
    first = watched(case, model, step)
    second = watched(case, model, step)
    step(model)
    second.step()
    found = [f"{path} has {len(c)} calls" for path, c in second.calls.items() if len(c) != 1]
    second.close()
    first.close()
    counts = hook_counts(model)
    return (
        found
        + ([f"hooks left: {counts}"] if sum(counts) != 1 else [])
        + ([] if case.user_hook.count == 1 else [f"the user's hook ran {case.user_hook.count} times"])
    )


def raising(case: ModuleType) -> list[str]:
    """The exception comes through, leaves no hook, and a new watch begins clean."""
    model, step = case.build()
    found = []
    try:
        with watched(case, model, step) as watch:
            step(model)
            watch.step()
            step(model)
        found.append("no exception")
    except ValueError as error:
        if str(error) != case.EXPECT["behaviour"]["exception_passes_through"]:
            found.append(f"exception {error}")
    if any(hook_counts(model)):
        found.append(f"hooks left: {hook_counts(model)}")
    with watched(case, model, step) as again:
        step(model)
        again.step()
    first, second = (list(w.run["parameter_gradients/norm"].values[0]) for w in (watch, again))
    return found if first == second else [*found, f"{second} after the exception, {first} before"]


def apart(case: ModuleType) -> list[str]:
    """Two models of one class, watched separately."""
    model, step = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b = (ks.watch(part) for part in (model.a, model.b))
        step(model)
        a.step()
        b.step()
        a.close()
        b.close()
    norms = [watch.run["parameter_gradients/norm"].of("layer.weight").values.item() for watch in (a, b)]
    got = {"params": {f"{n}.layer.weight": {"grad_norm": norm} for n, norm in zip("ab", norms, strict=True)}}
    return differences(case, got)


def filed(case: ModuleType) -> list[str]:
    """Names and numbers, in a file and back."""
    model, step = case.build()
    wanted = case.EXPECT.get("names") or case.EXPECT.get("names_clean") or list(case.EXPECT["params"])
    with tempfile.TemporaryDirectory() as folder:
        with watched(case, model, step, path=Path(folder) / "run.h5", calls=False) as watch:
            for _ in range(steps_of(case)):
                step(model)
                watch.step()
        with ks.open_run(watch.path) as run:
            series = run["parameter_gradients/norm"]
            got = dict(zip((site.path for site in series.sites), series.values[0].tolist(), strict=True))
    found = [f"missing: {name}" for name in wanted if name not in got]
    for name, fact in case.EXPECT["params"].items():
        want, norm = fact["grad_norm"], got.get(name, math.nan)
        if (math.isnan(norm) if want is not None else not math.isnan(norm)) or (
            want is not None and not close(want, norm, getattr(case, "RTOL", 1e-4))
        ):
            found.append(f"{name}: {norm} instead of {want}")
    return found


def copied(case: ModuleType) -> list[str]:
    """A copy made in the middle of a step records nothing."""
    model, step = case.build()
    with watched(case, model, step) as watch:
        step(model)
        twin = copy.deepcopy(model)
        watch.step()
        before = {path: len(c) for path, c in watch.calls.items()}
        twin(case.data()).sum().backward()
        after = {path: len(c) for path, c in watch.calls.items()}
    return [] if before == after else [f"the copy recorded: {before}, then {after}"]
