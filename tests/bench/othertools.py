"""Tools that others make, as context managers over a training, each as its own documentation says it is used.

Those that take over a whole step (TorchLens, nnsight, TransformerLens) replace ``training.step``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from pairs import Attach, ordinary
from torch import Tensor, nn
from torch.nn import functional as F
from workloads import Training, Workload

__all__ = [
    "anomaly",
    "before_step",
    "clipped",
    "composed",
    "grad_flow",
    "histograms",
    "hooked",
    "lightning_norms",
    "nnsight_blocks",
    "optimizer_monitor",
    "run_with_cache",
    "torchlens_trace",
    "tracked",
]


def before_step(look: Callable[[Training], object]) -> Attach:
    """What a user calls between backward and optimizer step."""

    @contextmanager
    def attach(training: Training) -> Iterator[None]:
        def hook(*_: object) -> None:
            look(training)

        handle = training.optimizer.register_step_pre_hook(hook)
        yield
        handle.remove()

    return attach


def grad_flow(training: Training) -> list[tuple[float, float]]:
    """The numbers of the bar chart that is pasted from forums: mean and largest magnitude for every weight."""
    weights = [p for name, p in training.model.named_parameters() if p.grad is not None and "bias" not in name]
    return [(p.grad.abs().mean().item(), p.grad.abs().max().item()) for p in weights]


def clipped(training: Training) -> Tensor:
    return nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)


def lightning_norms(training: Training) -> dict[str, float]:
    from lightning.pytorch.utilities import grad_norm

    return {name: float(norm) for name, norm in grad_norm(training.model, norm_type=2).items()}


@contextmanager
def histograms(training: Training) -> Iterator[None]:
    """``add_histogram`` of every parameter and its gradient."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:

        def write(*_: object) -> None:
            for name, parameter in training.model.named_parameters():
                writer.add_histogram(name, parameter.detach())
                writer.add_histogram(f"{name}.grad", parameter.grad)

        handle = training.optimizer.register_step_pre_hook(write)
        yield
        handle.remove()


@contextmanager
def anomaly(training: Training) -> Iterator[None]:
    plain = training.step

    def step() -> None:
        with torch.autograd.detect_anomaly(check_nan=True):
            plain()

    training.step = step
    yield


@contextmanager
def tracked(training: Training) -> Iterator[None]:
    """tensor-tracker with the standard deviation as what it keeps of a tensor."""
    import tensor_tracker

    with tensor_tracker.track(training.model, stash_value=lambda t: t.detach().std().cpu()) as tracker:
        handle = training.optimizer.register_step_post_hook(lambda *_: tracker.clear())
        yield
        handle.remove()


@contextmanager
def torchlens_trace(training: Training) -> Iterator[None]:
    import torchlens
    from torchlens.options import CaptureOptions

    options = CaptureOptions(save_grads=True, backward_ready=True)

    def step() -> None:
        trace = torchlens.trace(training.model, training.x, capture=options)
        trace.log_backward(F.cross_entropy(trace.output_ops[0].out.flatten(0, -2), training.y))
        training.optimizer.step()
        training.optimizer.zero_grad()

    training.step = step
    yield


@contextmanager
def nnsight_blocks(training: Training) -> Iterator[None]:
    """Outputs of blocks and their gradients, saved; no number is made of them."""
    import nnsight

    model = nnsight.NNsight(training.model)
    blocks = model.blocks if hasattr(training.model, "blocks") else model.transformer.h

    def step() -> None:
        with model.trace(training.x):
            outputs, gradients = nnsight.save([]), nnsight.save([])
            for block in blocks:
                outputs.append(block.output)
            logits = model.output
            logits = getattr(logits, "logits", logits)
            loss = F.cross_entropy(logits.flatten(0, -2), training.y)
            with loss.backward():
                for output in reversed(outputs):
                    gradients.append(output.grad)
        if len(gradients) != len(blocks):
            raise RuntimeError("nnsight saved no gradients")
        training.optimizer.step()
        training.optimizer.zero_grad()

    training.step = step
    yield


class HookedTraining(Training):
    """TransformerLens's own model has a loss of its own."""

    def step(self) -> None:
        self.model(self.x, return_type="loss").backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def hooked(workload: Workload) -> Training:
    """The tile's shape as a model of TransformerLens."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    layers, width, heads, vocabulary = {
        "W1": (4, 128, 4, 256),
        "W2": (1, 768, 12, 1024),
        "W3": (10, 64, 4, 256),
    }[workload.name]
    batch = workload.batch()
    config = HookedTransformerConfig(
        n_layers=layers,
        d_model=width,
        n_heads=heads,
        d_head=width // heads,
        d_mlp=4 * width,
        d_vocab=vocabulary,
        n_ctx=batch[0].shape[1],
        act_fn="gelu",
        normalization_type="LN",
        device="cpu",
    )
    return HookedTraining(HookedTransformer(config), batch)


@contextmanager
def run_with_cache(training: Training) -> Iterator[None]:
    def step() -> None:
        training.model.run_with_cache(training.x, return_type="loss", incl_bwd=True)
        training.optimizer.step()
        training.optimizer.zero_grad()

    training.step = step
    yield


def composed(workload: Workload) -> Training:
    """With Composer's AdamW, which reports norms of its moments and of updates."""
    from composer.optim import DecoupledAdamW

    training = ordinary(workload)
    training.optimizer = DecoupledAdamW(training.model.parameters(), lr=1e-4)
    return training


@contextmanager
def optimizer_monitor(training: Training) -> Iterator[None]:
    """``OptimizerMonitor`` on every step, called as Composer's trainer does; what it logs goes nowhere."""
    from composer.callbacks import OptimizerMonitor

    monitor = OptimizerMonitor(batch_log_interval=1)
    state = SimpleNamespace(
        model=training.model,
        optimizers=[training.optimizer],
        fsdp_enabled=False,
        timestamp=SimpleNamespace(batch=SimpleNamespace(value=1)),
    )
    logger = SimpleNamespace(log_metrics=lambda _: None)
    handle = training.optimizer.register_step_post_hook(lambda *_: monitor.batch_end(state, logger))
    yield
    handle.remove()
