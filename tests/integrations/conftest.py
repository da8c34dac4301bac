"""The loop written by hand that every trainer is compared with, and a run without keelscope."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks

OWN = {"scalars/watch_ms", "scalars/wall_time"}


@dataclass
class Truth:
    """What a loop without any hook computes."""

    gradients: list[list[float]] = field(default_factory=list)
    """Norm of each parameter's gradient before clipping, ``[step][parameter]``."""
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    skipped: int = 0

    def check(self, run: ks.Run, first: int = 0) -> None:
        steps = list(range(first, first + len(self.losses)))
        norms = run["parameter_gradients/norm"]
        assert norms.steps.tolist() == steps
        order = [self.paths.index(site.path) for site in norms.sites]
        np.testing.assert_allclose(norms.values, np.array(self.gradients)[:, order], rtol=1e-5)
        totals = np.linalg.norm(self.gradients, axis=1)
        np.testing.assert_allclose(run["scalars/grad_norm_total"].values, totals, rtol=1e-5)
        np.testing.assert_allclose(run["scalars/lr"].values, self.rates, rtol=1e-6)
        assert run["scalars/loss"].steps.tolist() == steps
        np.testing.assert_allclose(run["scalars/loss"].values, self.losses, rtol=1e-5)

    paths: list[str] = field(default_factory=list)


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable,
    loss_of: Callable[[nn.Module, object], torch.Tensor],
    *,
    accumulate: int = 1,
    clip: float = math.inf,
    precision: str = "",
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    always_schedule: bool = False,
    **options,
) -> SimpleNamespace:
    """The plain loop, watched; and what it computes, measured without keelscope. Skipped attempts are no steps.

    With ``precision="fp16"`` gradients are scaled as by `scaler`; the schedule goes on at a skipped attempt or not.
    """
    truth = Truth(paths=[path for path, _ in model.named_parameters()])
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    autocast = torch.autocast("cpu", half) if half else contextlib.nullcontext()
    scaling = scaler(enabled=precision == "fp16")
    with ks.watch(model, optimizer=optimizer, **options) as watch:
        rows = list(batches)
        for micro in (rows[i : i + accumulate] for i in range(0, len(rows), accumulate)):
            loss = 0.0
            for batch in micro:
                with autocast:
                    part = loss_of(model, batch) / accumulate
                scaling.scale(part).backward()
                loss += part.item()
            scaling.unscale_(optimizer)
            gradients = [p.grad.double().norm().item() for p in model.parameters()]
            skipped = not np.isfinite(gradients).all()
            truth.skipped += skipped
            if not skipped:
                truth.gradients.append(gradients)
                truth.losses.append(loss)
                truth.rates.append(optimizer.param_groups[0]["lr"])
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()
            watch.log(loss=loss)
            if scheduler is not None and (always_schedule or not skipped):
                scheduler.step()
    assert (truth.skipped > 0) is (precision == "fp16"), "the scaler must have something to skip"
    return SimpleNamespace(run=watch.run, truth=truth, model=model)


def scaler(*, enabled: bool = True) -> torch.amp.GradScaler:
    """One that is too large at first, so that attempts are skipped until it fits."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1000, enabled=enabled)


def same_run(run: ks.Run, other: ks.Run, rtol: float = 1e-5) -> None:
    """Every series of two runs: same steps, same sites, same numbers."""
    assert set(run.keys()) == set(other.keys())
    for key in sorted(set(run.keys()) - OWN):
        assert run[key].steps.tolist() == other[key].steps.tolist(), key
        assert run[key].sites == other[key].sites, key
        np.testing.assert_allclose(run[key].values, other[key].values, rtol=rtol, atol=1e-7, err_msg=key)


def same_weights(model: nn.Module, other: nn.Module) -> None:
    """Bit for bit."""
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


@pytest.fixture(scope="session")
def loops() -> SimpleNamespace:
    return SimpleNamespace(by_hand=by_hand, same_run=same_run, same_weights=same_weights, scaler=scaler)


@pytest.fixture(autouse=True)
def fresh_state(operators: None) -> None:
    """Accelerate keeps the precision of a process for good."""
    with contextlib.suppress(ImportError):
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
