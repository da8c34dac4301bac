"""Losses for a report: chosen from the output and the batch, named by the user, or the user's own function.

Each loss is called as ``loss(output, batch)`` and returns one differentiable number. `Loss` checks that, and remembers
which rule was applied, so that the report can say it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from keelscope.errors import LossError
from keelscope.targets.locate import first_line, import_object

__all__ = ["NAMES", "Loss", "choose"]

NAMES = ("auto", "sum", "lm", "cross_entropy")
NOISE_SEED = 0x6B65656C  # far from the seeds people give to inputs: equal seeds would draw the input again
DOCS = {
    "output.loss": "the loss that the model itself returns",
    "sum": "the sum of the first floating output",
    "lm": "next-token cross entropy",
    "cross_entropy": "cross entropy against the batch's targets, or random ones where an --input has none",
    "regression": "mean square of the first floating output minus fixed unit noise",
}


@dataclass(slots=True)
class Loss:
    """A loss function that checks its own result.

    Example:
        >>> loss = choose("sum")
        >>> loss(torch.ones(3, requires_grad=True), None).item(), loss.used
        (3.0, 'sum')
    """

    name: str
    function: Callable[[object, object], object] | None = None
    """The user's own function; None for a name of `NAMES`."""
    used: str = ""
    """The rule that was applied, known after the first call."""

    def __call__(self, output: object, batch: object) -> Tensor:
        """One differentiable number from the model's output.

        Args:
            output: whatever the model returned.
            batch: the batch it was given.

        Returns:
            The loss, a real tensor with one entry.

        Raises:
            LossError: if that cannot be computed, or does not depend on the model.
        """
        if self.function is not None:
            self.used = self.name
            value = _own(self.function, self.name, output, batch)
        else:
            self.used = _automatic(output, batch) if self.name == "auto" else self.name
            value = _RULES[self.used](output, batch)
        return _checked(value, self.used)

    def describe(self) -> str:
        """The rule in words, e.g. ``lm (next-token cross entropy; chosen from the output)``."""
        if self.function is not None or not self.used:
            return self.name
        chosen = "; chosen from the output, --loss overrides" if self.name == "auto" else ""
        return f"{self.used} ({DOCS[self.used]}{chosen})"


def choose(name: str) -> Loss:
    """The loss that ``--loss`` names.

    Args:
        name: one of `NAMES`, or ``pkg.mod:fn`` for a function of ``(output, batch)``.

    Returns:
        The loss.

    Raises:
        LossError: if there is no such name.
        TargetError: if the function does not exist.
    """
    if name in NAMES:
        return Loss(name)
    if ":" not in name:
        raise LossError(f"there is no loss {name!r}; use {', '.join(NAMES)} or pkg.mod:function.")
    function = import_object(name, "loss")
    if not callable(function):
        raise LossError(f"{name} is a {type(function).__name__}, not a function of (output, batch).")
    return Loss(name, function)


def _automatic(output: object, batch: object) -> str:
    if isinstance(_named(output, "loss"), Tensor):
        return "output.loss"
    if isinstance(output, Tensor) and output.ndim == 0:
        return "output.loss"
    scores, targets, tokens = _scores(output), _targets(batch), _tokens(batch)
    if scores is not None and targets is not None and _fits(scores, targets):
        return "cross_entropy"
    if scores is not None and tokens is not None and _fits(scores, tokens) and scores.ndim == 3:
        return "lm"
    return "regression"


def _returned(output: object, _: object) -> object:
    loss = _named(output, "loss")
    return output if loss is None else loss


def _sum(output: object, _: object) -> Tensor:
    return _first_floating(output).sum()


def _lm(output: object, batch: object) -> Tensor:
    scores, tokens = _scores(output), _tokens(batch)
    if scores is None or tokens is None or not _fits(scores, tokens) or scores.ndim != 3:
        raise LossError(
            f"loss lm needs int64 tokens [batch, position] and logits [batch, position, vocabulary], "
            f"found {_shape(tokens)} and {_shape(scores)}; use another --loss."
        )
    return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _cross_entropy(output: object, batch: object) -> Tensor:
    scores, targets = _scores(output), _targets(batch)
    if targets is None and scores is not None and not isinstance(batch, (tuple, dict)):
        generator = torch.Generator().manual_seed(NOISE_SEED)  # the batch has no labels: any will show the gradient
        targets = torch.randint(scores.shape[-1], scores.shape[:-1], generator=generator).to(scores.device)
    if targets is None:
        raise LossError("loss cross_entropy needs integer targets as the last entry of a tuple batch; give --batch.")
    if scores is None or not _fits(scores, targets):
        raise LossError(
            f"loss cross_entropy cannot match scores {_shape(scores)} with targets {_shape(targets)}; "
            "scores are targets' shape plus one last axis of classes."
        )
    return F.cross_entropy(scores.flatten(0, -2).float(), targets.flatten())


def _regression(output: object, _: object) -> Tensor:
    """Unit noise as target: the plain mean square has no gradient at all through a final LayerNorm."""
    values = _first_floating(output)
    wide = values.abs().float() if values.is_complex() else values.float()
    generator = torch.Generator().manual_seed(NOISE_SEED)
    noise = torch.randn(wide.shape, generator=generator).to(wide.device)
    return (wide - noise).square().mean()


_RULES: Mapping[str, Callable[[object, object], object]] = {
    "output.loss": _returned,
    "sum": _sum,
    "lm": _lm,
    "cross_entropy": _cross_entropy,
    "regression": _regression,
}


def _own(function: Callable[[object, object], object], name: str, output: object, batch: object) -> object:
    try:
        return function(output, batch)
    except Exception as error:  # the user's code may raise anything
        raise LossError(f"loss {name} raised {first_line(error)} (--debug shows where).") from error


def _checked(value: object, name: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise LossError(f"loss {name} returned a {type(value).__name__}; it must return a tensor with one number.")
    if value.numel() != 1 or value.is_complex():
        raise LossError(
            f"loss {name} returned {_shape(value)}, not one real number; reduce it, e.g. by .mean(), "
            "or give another --loss."
        )
    if not value.requires_grad:
        raise LossError(
            f"loss {name} does not depend on any parameter that requires a gradient (detached or no_grad?)."
        )
    return value


def _leaves(value: object, depth: int = 0) -> Iterator[Tensor]:
    """Tensors in an output of any nesting, in order."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth > 8:
        return
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif is_dataclass(value):
        inner = [getattr(value, field.name) for field in fields(value)]
    else:
        return
    for item in inner:
        yield from _leaves(item, depth + 1)


def _named(output: object, name: str) -> object:
    if isinstance(output, Mapping):
        return output.get(name)
    return None if isinstance(output, Tensor) else getattr(output, name, None)


def _first_floating(output: object) -> Tensor:
    for leaf in _leaves(output):
        if (leaf.is_floating_point() or leaf.is_complex()) and leaf.requires_grad:
            return leaf
    raise LossError("the model's output holds no floating tensor that requires a gradient; give --loss pkg.mod:fn.")


def _scores(output: object) -> Tensor | None:
    """The logits: by name where the output has names, else the first floating tensor."""
    named = _named(output, "logits")
    if isinstance(named, Tensor):
        return named
    if isinstance(output, Tensor):
        return output if output.is_floating_point() and output.ndim >= 2 else None
    if isinstance(output, (tuple, list)) and not hasattr(output, "_fields"):
        return next((leaf for leaf in _leaves(output) if leaf.is_floating_point() and leaf.ndim >= 2), None)
    return None


def _targets(batch: object) -> Tensor | None:
    last = batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    return last if isinstance(last, Tensor) and last.dtype == torch.int64 else None


def _tokens(batch: object) -> Tensor | None:
    if isinstance(batch, Mapping) and "decoder_input_ids" in batch:
        batch = batch["decoder_input_ids"]
    found = (leaf for leaf in _leaves(batch) if leaf.dtype == torch.int64 and leaf.ndim == 2)
    return next(found, None)


def _fits(scores: Tensor, indices: Tensor) -> bool:
    if scores.shape[:-1] != indices.shape or not indices.numel():
        return False
    return bool(indices.min() >= 0) and bool(indices.max() < scores.shape[-1])


def _shape(value: object) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else "none"
