"""A training of two ranks under each trainer, and what it was trained on."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

TESTS = Path(__file__).parents[1]
STEPS, ACCUMULATE, ROWS, CLIP = 3, 2, 2, 0.05


def module(path: str) -> ModuleType:
    """A file of the tests."""
    spec = importlib.util.spec_from_file_location(f"tests of {path}", TESTS / path)
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def launched() -> None:
    """What `torchrun` tells each of its processes."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank()), "MASTER_ADDR": "localhost"}
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "tests", "HF_HUB_OFFLINE": "1"}
    os.environ["MASTER_PORT"] = "29500"  # nobody connects: the ranks have found each other
    module("conftest.py").declare_operators()
    warnings.simplefilter("ignore")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 1))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batches() -> list[Tensor]:
    """Each is split over the ranks."""
    return list(torch.randn(STEPS * ACCUMULATE, 2 * ROWS, 6, generator=torch.Generator().manual_seed(1)))


def own() -> list[Tensor]:
    return [batch.chunk(2)[dist.get_rank()] for batch in batches()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def huggingface(path: str) -> list[dict[str, Tensor]]:
    """A real Trainer; each rank gives back the batches that it saw."""
    launched()
    from keelscope.integrations.huggingface import KeelscopeCallback

    theirs = module("integrations/test_huggingface.py")
    seen = theirs.Batches()
    options: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": ROWS, "max_grad_norm": CLIP}
    options |= {"gradient_accumulation_steps": ACCUMULATE, "ddp_backend": "gloo", "lr_scheduler_type": "constant"}
    learner = theirs.trainer(
        theirs.gpt2(), Path(path).parent, KeelscopeCallback(path), collator=seen, adam_epsilon=1e-4, **options
    )
    assert learner.args.world_size == 2
    learner.train()
    return seen.seen[: STEPS * ACCUMULATE]


def lightning(path: str) -> tuple[int, list[float]]:
    """A real Trainer with its strategy for DDP; each rank gives back its own losses."""
    launched()
    import lightning.pytorch as pl

    from keelscope.integrations.lightning import KeelscopeCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Learner(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []

        def training_step(self, batch: Tensor, _index: int) -> Tensor:
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 1}
    options |= dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options |= {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": CLIP, "use_distributed_sampler": False}
    learner = pl.Trainer(callbacks=[KeelscopeCallback(path)], default_root_dir=Path(path).parent, **options)
    trained = Learner()
    learner.fit(trained, torch.utils.data.DataLoader(own(), batch_size=None))
    return learner.world_size, per_step(trained.losses)


def per_step(losses: list[float]) -> list[float]:
    return [sum(losses[i : i + ACCUMULATE]) / ACCUMULATE for i in range(0, len(losses), ACCUMULATE)]


def accelerate(path: str) -> tuple[int, list[float]]:
    """The loop of its documentation."""
    launched()
    from accelerate import Accelerator

    from keelscope.integrations.accelerate import watch_accelerated

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = net()
    model, optimizer = accelerator.prepare(model, sgd(model))
    losses: list[float] = []
    with watch_accelerated(accelerator, model, optimizer, path) as watch:
        for batch in own():
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                watch.log(loss=per_step(losses)[-1])
    return accelerator.num_processes, per_step(losses)
