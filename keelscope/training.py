"""Train a language model on a `Text`, for real and the same way every time.

The loop knows nothing of recording: a watch made by the caller around `Trainer.optimizer` sees the steps through the
optimizer's hooks, and is given the scalars of each step. The command line and `sweep` drive it.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F

from keelscope.errors import UsageError
from keelscope.models.epsilon import EpsilonSchedule, set_epsilon

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from keelscope.text import Text

__all__ = ["ScalarLog", "Trainer", "TrainingConfig", "TrainingResult", "learning_rate", "train"]


class ScalarLog(Protocol):
    """What the loop needs of a watch."""

    def log(self, **scalars: float) -> object:
        """Keep scalars of the step that was just made.

        Args:
            scalars: Name -> value.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """How a model is trained.

    Raises:
        UsageError: For a value that cannot be used, in one sentence that says what can.
    """

    steps: int = 100
    """Number of optimizer steps."""
    batch_size: int = 8
    """Windows of text per step."""
    length: int = 128
    """Tokens per window."""
    learning_rate: float = 1e-3
    """Peak of the learning rate."""
    warmup: int = 10
    """Steps over which the learning rate rises linearly to the peak; cosine to 0 after that."""
    weight_decay: float = 0.01
    """AdamW's decoupled decay, on matrices only."""
    clip: float | None = 1.0
    """Largest total gradient norm; None does not clip."""
    seed: int = 0
    """Which batches are drawn, and which entries a dropout drops."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """``bfloat16`` runs forward and loss under autocast; the weights stay as they are."""

    epsilon: EpsilonSchedule | None = None
    """Epsilon of the model's norms, step by step; None leaves it as it was built."""

    def __post_init__(self) -> None:
        for name, minimum in (("steps", 1), ("batch_size", 1), ("length", 1), ("warmup", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise UsageError(f"{name} = {value!r} cannot be used: give a whole number, {minimum} or more")
        for name in ("learning_rate", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} = {getattr(self, name)!r} cannot be used: give a number, 0 or more")
        if self.clip is not None and not self.clip > 0:
            raise UsageError(f"clip = {self.clip!r} cannot be used: give a number above 0, or None for no clipping")
        if self.precision not in {"float32", "bfloat16"}:
            raise UsageError(f"precision = {self.precision!r} is not known: choose float32 or bfloat16")


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What came of a training."""

    status: Literal["completed", "diverged"]
    """``"diverged"``: the loss stopped being a number; training ended at that step."""
    message: str
    """The status in one sentence."""
    losses: tuple[float, ...]
    """Cross-entropy in nats per token, ``[step]``."""
    gradient_norms: tuple[float, ...]
    """Total gradient norm before clipping, ``[step]``."""
    tokens_per_second: float
    """Tokens trained on per second of wall time."""

    @property
    def steps(self) -> int:
        """Number of steps made."""
        return len(self.losses)


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Linear warm-up to the peak, then half a cosine to 0.

    Args:
        config: Peak, warm-up and number of steps.
        step: Step from 0.

    Returns:
        The learning rate of that step.

    Example:
        >>> config = TrainingConfig(steps=12, warmup=2, learning_rate=1.0)
        >>> [round(learning_rate(config, step), 3) for step in (0, 1, 2, 7, 11)]
        [0.5, 1.0, 1.0, 0.5, 0.024]
    """
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return groups for a torch optimizer: matrices decay, the rest (norms, biases, gates) does not.

    A model with ``parameter_groups(weight_decay)`` decides itself; ``scale`` in a group multiplies its learning rate.
    """
    own = getattr(model, "parameter_groups", None)
    if own is not None:
        return list(own(weight_decay))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class Trainer:
    """A model, its optimizer and the text it learns from.

    Args:
        model: Maps tokens int64 ``[batch, position]`` to logits ``[batch, position, 256]``.
        text: Where batches come from.
        config: How to train.

    Raises:
        UsageError: If the model is a reference model with a vocabulary smaller than the 256 bytes.

    Example:
        >>> from keelscope.models import build
        >>> from keelscope.text import Text
        >>> config = TrainingConfig(steps=3, batch_size=2, length=16)
        >>> result = Trainer(build("keel", depth=4, width=16, heads=2), Text.read(), config).run()
        >>> result.status, result.steps
        ('completed', 3)
    """

    def __init__(self, model: nn.Module, text: Text, config: TrainingConfig) -> None:
        vocabulary = getattr(getattr(model, "config", None), "vocabulary", 256)
        if vocabulary < 256:
            raise UsageError(f"the model knows {vocabulary} tokens, text has 256 (bytes): build it with vocabulary=256")
        self.model = model
        self.text = text
        self.config = config
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(model, config.weight_decay), lr=config.learning_rate, betas=(0.9, 0.95)
        )
        self.device = next(model.parameters()).device
        self._losses: list[float] = []
        self._norms: list[float] = []

    def run(
        self, *, watch: ScalarLog | None = None, on_step: Callable[[int, float], object] | None = None
    ) -> TrainingResult:
        """Train to the end, or to the step whose loss is not a number.

        Dropout draws from the seed; the global random state is as before afterwards.

        Args:
            watch: Gets loss, lr, grad_norm_total and tokens after each optimizer step.
            on_step: Called with step and loss after that.

        Returns:
            Losses, norms and speed.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        self.model.train()
        done, begin = len(self._losses), time.perf_counter()
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.config.seed)
            for step in range(done, self.config.steps):
                self._step(step, watch)
                if on_step is not None:
                    on_step(step, self._losses[-1])
                if not math.isfinite(self._losses[-1]):
                    break
        tokens = (len(self._losses) - done) * self.config.batch_size * self.config.length
        return self._result(tokens / (time.perf_counter() - begin))

    def _step(self, step: int, watch: ScalarLog | None) -> None:
        config = self.config
        rate = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("scale", 1.0)
        if config.epsilon is not None:
            set_epsilon(self.model, config.epsilon.at(step))
        loss = self._loss(step)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        limit = math.inf if config.clip is None else config.clip
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        after_step = getattr(self.model, "after_step", None)
        if after_step is not None:
            after_step()
        self._losses.append(loss.item())
        self._norms.append(norm.item())
        if watch is not None:
            tokens = (step + 1) * config.batch_size * config.length
            watch.log(loss=self._losses[-1], lr=rate, grad_norm_total=self._norms[-1], tokens=float(tokens))

    def _loss(self, step: int) -> Tensor:
        config = self.config
        tokens, targets = self.text.batch(step, config.batch_size, config.length, seed=config.seed)
        with self._autocast():
            logits = self.model(tokens.to(self.device))  # [batch, position, vocabulary]
            return F.cross_entropy(logits.flatten(0, 1), targets.to(self.device).flatten())

    def _autocast(self) -> AbstractContextManager[object]:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _result(self, tokens_per_second: float) -> TrainingResult:
        loss, last = self._losses[-1], len(self._losses) - 1
        finite = math.isfinite(loss)
        message = f"{last + 1} steps, last loss {loss:.3f}"
        if not finite:
            message = f"the loss is {loss} at step {last}: training stopped there; try a smaller learning rate"
        return TrainingResult(
            status="completed" if finite else "diverged",
            message=message,
            losses=tuple(self._losses),
            gradient_norms=tuple(self._norms),
            tokens_per_second=tokens_per_second,
        )


def train(
    model: nn.Module,
    text: Text,
    config: TrainingConfig,
    *,
    on_step: Callable[[int, float], object] | None = None,
    watch: ScalarLog | None = None,
) -> TrainingResult:
    """Train a model on text; `Trainer` gives the optimizer as well, for a watch.

    Args:
        model: Maps tokens int64 ``[batch, position]`` to logits ``[batch, position, 256]``.
        text: Where batches come from.
        config: How to train.
        on_step: Called with step and loss after each step.
        watch: Gets loss, lr, grad_norm_total and tokens after each optimizer step.

    Returns:
        Losses, norms and speed.
    """
    return Trainer(model, text, config).run(watch=watch, on_step=on_step)
