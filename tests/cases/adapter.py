"""What keelscope records about a hard case, in the keys of its EXPECT, through the public interface only."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

import keelscope as ks

Facts = dict[str, Any]


def observe(case: ModuleType, model: nn.Module, step: Callable[[nn.Module], Any], n_steps: int = 1) -> Facts:
    """Attach, run the steps, detach; what was recorded of the first step, and of each in ``steps``."""
    optimizer = optimizers_of(case, model, step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = ks.watch(model, optimizer=optimizer, sites="all", probes=["default", "inputs"], calls=True)
        steps = []
        try:
            for number in range(n_steps):
                loss = step(model)
                watch.step()
                steps.append({**_modules(watch), **_parameters(watch, number), "loss": loss})
        finally:
            watch.close()
    buffers = {name: buffer.detach().double().sum().item() for name, buffer in model.named_buffers()}
    return {**steps[0], "steps": steps, "buffers": buffers}


def optimizers_of(case: ModuleType, model: nn.Module, step: Callable[[nn.Module], Any]) -> Any:
    """The optimizers a user would pass: those the case offers, or those its step function uses."""
    if hasattr(step, "optimizer"):
        return step.optimizer
    cells = [cell.cell_contents for cell in (step.__closure__ or ())]
    found = [value for value in cells if isinstance(value, torch.optim.Optimizer)]
    return found or None


def _modules(watch: ks.Watch) -> Facts:
    facts = {}
    for path, calls in watch.calls.items():
        facts[path] = {
            "calls": len(calls),
            "act_var": [call.outputs.get("variance") for call in calls],
            "act_mean": [call.outputs.get("mean") for call in calls],
            "n": [call.outputs.get("count") for call in calls],
            "in_var": [call.inputs.get("variance") for call in calls],
            "out_grad_norms": [_events(next((v for v in call.leaves.values() if v), ())) for call in calls],
            "leaf_grad_norms": [{leaf: _events(norms) for leaf, norms in call.leaves.items()} for call in calls],
        }
    return {"modules": facts}


def _events(norms: tuple[float, ...]) -> Any:
    """None where no gradient arrived, a number for one backward pass, a list for several."""
    return None if not norms else norms[0] if len(norms) == 1 else list(norms)


def _parameters(watch: ks.Watch, step: int) -> Facts:
    run = watch.run
    series = run["parameter_gradients/norm"]
    row = series.at(step)
    observed = {e.path for e in watch.coverage if e.what == "parameter" and e.status == "observed"}
    per_backward = watch.gradients
    facts = {}
    for site, norm in zip(series.sites, row, strict=True):
        passes = per_backward.get(site.path)
        known = site.path in observed and (passes is not None or not math.isnan(norm))
        facts[site.path] = {
            "grad_norm": float(norm) if known else None,
            "per_backward": list(passes.per_backward) if passes else [],
        }
    return {"params": facts, "total_grad_norm": float(run["scalars/grad_norm_total"].at(step))}
