"""What people use today, as context managers over a training; those that are not installed are left out."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from pairs import Attach
from torch import nn
from workloads import Training

__all__ = ["PEERS", "is_leaf", "naive", "underflow", "wandb_watch"]


def naive(chosen: Callable[[nn.Module], bool]) -> Attach:
    """The hooks people write first: six statistics with ``.item()``, forward and full backward, and norms."""

    @contextmanager
    def attach(training: Training) -> Iterator[None]:
        handles = []
        for module in filter(chosen, training.model.modules()):
            handles.append(module.register_forward_hook(lambda m, i, o: six(o)))
            handles.append(module.register_full_backward_hook(lambda m, i, o: six(o[0])))
        handles.append(training.optimizer.register_step_pre_hook(lambda *_: parameter_norms(training.model)))
        yield
        for handle in handles:
            handle.remove()

    return attach


def six(value: object) -> None:
    tensor = value[0] if isinstance(value, tuple) else value
    if isinstance(tensor, torch.Tensor):
        t = tensor.detach().float()
        for found in (t.mean(), t.var(), t.norm(), t.abs().max(), (t == 0).float().mean(), t.isfinite().all()):
            found.item()


def parameter_norms(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm().item()


def wandb_watch(log_freq: int) -> Attach:
    """``wandb.watch(log="all")``, offline; the time of its helper process is not in the figures."""

    @contextmanager
    def attach(training: Training) -> Iterator[None]:
        import wandb

        os.environ["WANDB_SILENT"] = "true"
        with tempfile.TemporaryDirectory() as folder, wandb.init(mode="offline", dir=folder) as run:
            run.watch(training.model, log="all", log_freq=log_freq)
            handle = training.optimizer.register_step_post_hook(lambda *_: run.log({"loss": 0.0}))
            yield
            handle.remove()
            run.unwatch(training.model)

    return attach


@contextmanager
def underflow(training: Training) -> Iterator[None]:
    """``DebugUnderflowOverflow`` of transformers."""
    from transformers.debug_utils import DebugUnderflowOverflow

    with contextlib.redirect_stdout(io.StringIO()):
        DebugUnderflowOverflow(training.model, max_frames_to_save=1)
        yield


def is_leaf(module: nn.Module) -> bool:
    return not any(module.children())


PEERS: dict[str, Attach] = {
    "naive `.item()` hooks, every leaf": naive(is_leaf),
    "naive `.item()` hooks, blocks": naive(lambda module: "Block" in type(module).__name__),
    "transformers DebugUnderflowOverflow": underflow,
}
if importlib.util.find_spec("wandb"):
    PEERS["wandb.watch(all, log_freq=1), offline"] = wandb_watch(1)
