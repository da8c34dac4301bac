"""One forward of a model and the loss it gives, with every failure in one sentence.

Used by `keelscope.oneshot` to record it and by `keelscope.topology` to read its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from keelscope.errors import BatchError, KeelscopeError, LossError

__all__ = ["LossFunction", "backward", "loss_of"]

LossFunction = Callable[[Any, Any], Tensor]


def loss_of(model: nn.Module, batch: object, loss_fn: LossFunction | None) -> Tensor:
    """One forward and its loss.

    Args:
        model: it gets ``*batch[:-1]`` of a tuple, ``**batch`` of a mapping, `batch` itself otherwise.
        batch: the batch.
        loss_fn: ``loss_fn(output, batch)``; None means ``output.loss``.

    Returns:
        A scalar that depends on the parameters.

    Raises:
        BatchError: if the model raises on the batch.
        LossError: if the loss is not one real number that depends on the parameters.
    """
    output = _forward(model, batch)
    if loss_fn is None:
        loss = getattr(output, "loss", None)
        if loss is None:
            raise LossError(
                "the model's output has no .loss; give loss_fn=, a function (output, batch) -> scalar tensor."
            )
        return _checked(loss)
    return _checked(_called(loss_fn, output, batch))


def _called(loss_fn: LossFunction, output: object, batch: object) -> object:
    try:
        return loss_fn(output, batch)
    except KeelscopeError:
        raise
    except Exception as error:
        raise LossError(
            f"the loss function raised {type(error).__name__}: {_first_line(error)}; it is called as "
            "loss_fn(output, batch) with the whole batch."
        ) from error


def _forward(model: nn.Module, batch: object) -> object:
    try:
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, tuple):
            return model(*(batch[:-1] if len(batch) > 1 else batch))
        return model(batch)
    except Exception as error:
        if batch is None:
            raise BatchError(f"{type(model).__name__} needs a batch: report(model, batch, loss_fn).") from error
        raise BatchError(
            f"{type(model).__name__} rejects the batch ({type(error).__name__}: {_first_line(error)}); check its "
            "shape, dtype and device."
        ) from error


def _checked(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise LossError(f"the loss must be a tensor; got {type(loss).__name__}.")
    if loss.numel() != 1 or loss.is_complex() or not loss.is_floating_point():
        raise LossError(f"the loss must be one real number; got shape {list(loss.shape)}, dtype {loss.dtype}.")
    if not loss.requires_grad:
        raise LossError(
            "the loss does not depend on any parameter through the graph (is it detached, or under no_grad?)."
        )
    return loss


def backward(loss: Tensor) -> None:
    """The backward pass of a loss.

    Args:
        loss: the loss.

    Raises:
        LossError: if it raises.
    """
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise LossError(f"the backward pass raised {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]
