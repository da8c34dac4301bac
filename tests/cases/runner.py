"""Runs every hard case in a process of its own and prints one line of JSON for each: what is wrong, by kind of check.

Run as a script, so that each process is forked from one that has imported torch and done nothing yet.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import math
import multiprocessing
import signal
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # noqa: F401 - what cases import is imported once, before any process is forked
import torch.utils.checkpoint  # noqa: F401
from adapter import observe, optimizers_of
from facts import differences, load
from torch import nn

import keelscope as ks

HANDED = Path(__file__).with_name("handed")
OPTIONS: dict[str, Any] = {"sites": "all", "probes": ["default", "inputs", "updates"], "calls": True}
Check = Callable[[ModuleType], list[str]]


def watched(case: ModuleType, model: nn.Module, step: Callable[[nn.Module], Any]) -> ks.Watch:
    return ks.watch(model, optimizer=optimizers_of(case, model, step), **OPTIONS)


def steps_of(case: ModuleType) -> int:
    return getattr(case, "N_STEPS", 1)


def numbers(case: ModuleType) -> list[str]:
    model, step = case.build()
    if getattr(case, "EXPECT", {}).get("step_raises"):
        return []
    got = observe(case, model, step, steps_of(case))
    return differences(case, got)


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
    plain, plain_step = case.build()
    with contextlib.suppress(Exception):
        for _ in range(steps_of(case)):
            plain_step(plain)
    found = []
    if hook_counts(model) != hook_counts(plain):
        found.append(f"hooks {before} before, {hook_counts(model)} after, {hook_counts(plain)} without a watch")
    if [module.training for module in model.modules()] != [module.training for module in plain.modules()] != modes:
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


def calls(case: ModuleType) -> list[str]:
    model, step = case.build()
    with watched(case, model, step) as watch:
        step(model)
        watch.step()
        got = {path: len(watch.calls.get(path, ())) for path in case.EXPECT["calls"]}
    return [] if got == case.EXPECT["calls"] else [f"calls {got}"]


def twice(case: ModuleType) -> list[str]:
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
    evidence = case.EXPECT["evidence"]
    for run in (watch.run, again.run):
        got = [run["parameter_gradients/norm"].of("a.weight").values[0, 0], run["gradients/norm"].of("b").values[0, 0]]
        want = [evidence["step0_grad_norm_a.weight"], evidence["step0_out_grad_norm_b"]]
        if any(abs(a - b) > 1e-4 * b for a, b in zip(got, want, strict=True)):
            found.append(f"{got} instead of {want}")
    return found


def apart(case: ModuleType) -> list[str]:
    """Two models of one class, watched separately."""
    model, step = case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b = (ks.watch(part, **OPTIONS) for part in (model.a, model.b))
        step(model)
        a.step()
        b.step()
        a.close()
        b.close()
    norms = [watch.run["parameter_gradients/norm"].of("layer.weight").values.item() for watch in (a, b)]
    got = {"params": {f"{n}.layer.weight": {"grad_norm": norm} for n, norm in zip("ab", norms, strict=True)}}
    return differences(case, got)


def transform(case: ModuleType) -> list[str]:
    model, step = case.build()
    with watched(case, model, step) as watch:
        step(model)
    want = case.EXPECT["evidence"]["per_sample_grad_norms"]
    found = [f"{a} instead of {b}" for a, b in zip(step.norms, want, strict=True) if abs(a - b) > 1e-4 * b]
    said = [entry.reason for entry in watch.coverage if entry.status == "not_observed"]
    return found + ([] if any("functorch" in reason for reason in said) else ["nothing is said of the lost calls"])


def names(case: ModuleType) -> list[str]:
    """Clean names, in a file and back."""
    model, step = case.build()
    wanted = case.EXPECT.get("names") or case.EXPECT["names_clean"]
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with ks.watch(model, Path(folder) / "run.h5", **OPTIONS) as watch:
            step(model)
            watch.step()
        with ks.open_run(watch.path) as run:
            series = run["parameter_gradients/norm"]
            got = dict(zip((site.path for site in series.sites), series.values[0].tolist(), strict=True))
    missing = [name for name in wanted if name not in got]
    numbers = {"params": {path: {"grad_norm": None if math.isnan(n) else n} for path, n in got.items()}}
    return [f"missing {missing}"] if missing else differences(case, {**numbers, "loss": case.EXPECT.get("loss")})


def lazy(case: ModuleType) -> list[str]:
    model, step = case.build()
    with watched(case, model, step) as watch:
        step(model)
        watch.step()
    kinds = {site.kind for site in watch.run["outputs/mean"].sites if site.path in {"0", "2"}}
    return [] if kinds == {case.EXPECT["behaviour"]["class_after_first_step"]} else [f"classes {kinds}"]


def tied(case: ModuleType) -> list[str]:
    model, step = case.build()
    with watched(case, model, step) as watch:
        step(model)
        watch.step()
    sites = watch.run["parameter_gradients/norm"].sites
    aliases = {alias: site.path for site in sites for alias in site.aliases}
    return [] if aliases == case.EXPECT["aliases"] else [f"aliases {aliases}"]


def copied(case: ModuleType) -> list[str]:
    model, step = case.build()
    with watched(case, model, step) as watch:
        step(model)
        twin = copy.deepcopy(model)
        watch.step()
        before = {path: len(c) for path, c in watch.calls.items()}
        twin(case.data()).sum().backward()
        after = {path: len(c) for path, c in watch.calls.items()}
    return [] if before == after else [f"the copy recorded: {before}, then {after}"]


EVERY: dict[str, Check] = {"numbers": numbers, "hooks": hooks, "identity": identity}
SPECIAL: dict[str, dict[str, Check]] = {
    "attach_twice": {"twice": twice},
    "compile_hooks_late": {"names": names},
    "ddp_single": {"names": names},
    "deepcopy_ema": {"calls": calls, "copied": copied},
    "exception_mid_forward": {"raising": raising},
    "func_grad_vmap": {"transform": transform},
    "grad_penalty": {"memory": memory},
    "h5_names": {"names": names},
    "lazy_linear": {"lazy": lazy},
    "memory_growth": {"memory": memory},
    "mha_out_proj_uncalled": {"calls": calls},
    "no_grad_teacher": {"memory": memory},
    "tied_embedding_head": {"tied": tied},
    "two_models_same_class": {"apart": apart},
    "unused_vs_zero": {"calls": calls},
}


def examine(path: Path, results: multiprocessing.SimpleQueue) -> None:
    signal.alarm(60)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    for name, check in {**EVERY, **SPECIAL.get(path.stem, {})}.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found[name] = check(load(path))
        except BaseException as error:  # a crash is a finding, whatever it is
            found[name] = [f"{type(error).__name__}: {error}", traceback.format_exc(limit=-3)]
    results.put(json.dumps(found))


def main() -> None:
    context = multiprocessing.get_context("fork")
    for path in sorted(HANDED.glob("*.py")):
        results = context.SimpleQueue()
        process = context.Process(target=examine, args=(path, results))
        process.start()
        process.join(90)
        if process.is_alive():
            process.kill()
        found = json.loads(results.get()) if not results.empty() else {"process": [f"exit code {process.exitcode}"]}
        sys.stdout.write(json.dumps({"case": path.stem, "found": found}) + "\n")


if __name__ == "__main__":
    main()
