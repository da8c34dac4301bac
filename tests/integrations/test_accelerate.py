"""Accelerate, watched: the numbers of the loop written by hand, and the training it would have been."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.integrations.accelerate import watch_accelerated

installed = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="not installed: accelerate (make test installs it)"
)


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 1))


def batches() -> list[torch.Tensor]:
    return list(torch.randn(16, 4, 6, generator=torch.Generator().manual_seed(1)))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(loops, precision: str, start, dropout: float = 0.0) -> SimpleNamespace:
    """The loop of Accelerate's documentation: accumulation, clipping, a schedule."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    if precision == "fp16":  # it does so on a GPU, and computes in float32 on a CPU
        accelerator.native_amp, accelerator.scaler = True, loops.scaler()
    model = net(dropout)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    losses: list[float] = []
    with start(accelerator, model, optimizer) as watch:
        for batch in batches():
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if watch is not None and accelerator.sync_gradients:
                watch.log(loss=np.mean(losses[-2:]))
    return SimpleNamespace(watch=watch, model=accelerator.unwrap_model(model), rng=torch.get_rng_state(), losses=losses)


@installed
@pytest.mark.parametrize("how", ["helper", "watch", "wrapped"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_numbers_are_those_of_the_loop_by_hand(tmp_path, loops, precision, how):
    ways = {
        "helper": lambda a, model, opt: watch_accelerated(a, model, opt, tmp_path / "run.h5", config={"note": "mine"}),
        "watch": lambda a, model, opt: ks.watch(a.unwrap_model(model), tmp_path / "run.h5", optimizer=opt),
        "wrapped": lambda _, model, opt: ks.watch(model, tmp_path / "run.h5", optimizer=[opt]),
    }
    train(loops, precision, ways[how])
    model = net()
    optimizer = sgd(model)
    hand = loops.by_hand(
        model,
        optimizer,
        batches(),
        loss_of,
        accumulate=2,
        clip=0.05,
        precision=precision,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
    )
    assert min(np.linalg.norm(hand.truth.gradients, axis=1)) > 0.05, "clipping must have something to clip"
    with ks.open_run(tmp_path / "run.h5") as run:
        hand.truth.check(run)
        loops.same_run(run, hand.run)
        if how == "helper":
            wanted = {"mixed_precision": precision, "gradient_accumulation_steps": 2, "note": "mine"}
            assert run.info.config == wanted


@installed
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_training_is_what_it_would_have_been(loops, precision):
    from contextlib import nullcontext

    plain = train(loops, precision, lambda *_: nullcontext(), dropout=0.3)
    watched = train(loops, precision, lambda *prepared: watch_accelerated(*prepared, every=2), dropout=0.3)
    loops.same_weights(watched.model, plain.model)
    assert watched.losses == plain.losses
    assert torch.equal(watched.rng, plain.rng)


def test_only_the_main_process_writes(tmp_path):
    model = net()
    optimizer = sgd(model)
    other = SimpleNamespace(
        is_main_process=False, mixed_precision="no", gradient_accumulation_steps=1, unwrap_model=lambda wrapped: wrapped
    )
    with watch_accelerated(other, model, optimizer, tmp_path / "run.h5") as watch:
        for batch in batches():
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.log(loss=loss)
    assert watch.run["gradients/norm"].steps.tolist() == [0]
    assert list(tmp_path.iterdir()) == []
