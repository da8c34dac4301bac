"""`report`: one forward and backward of a model, or a recorded run, as a report with a verdict.

The model is left as it was: parameters, gradients, buffers, random state and modes. Recording is done by
`keelscope.session`, judging by `keelscope.diagnosis`. Without a model this module needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keelscope.errors import NothingToObserveError, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from keelscope.diagnosis import Report
    from keelscope.store.reader import Run

__all__ = ["record_once", "report"]

LossFunction = Callable[[Any, Any], "Tensor"]


def report(
    target: nn.Module | Run | str | Path,
    batch: object = None,
    loss_fn: LossFunction | None = None,
    **options: Any,
) -> Report:
    """Layer-wise gradient report of a model on one batch, or of a recorded run.

    Args:
        target: a module, a run, or the path of a run file.
        batch: for a module: it gets ``*batch[:-1]`` of a tuple, ``**batch`` of a mapping, `batch` itself otherwise.
        loss_fn: ``loss_fn(output, batch)``; None means ``output.loss``.
        options: for a module, `probes` (default: those of `keelscope.watch` and ``"sublayers"``), `sites` and `config`
            as in `keelscope.watch`.

    Returns:
        The report.

    Raises:
        UsageError: if `target` is none of these, or a batch is given with a run.
        ModelError: if the model cannot be run on the batch; parameters, buffers, gradients and modes are as before.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(12)])
        >>> report(net, torch.ones(4, 8), lambda output, batch: output.square().mean()).headline
        'vanishing'
    """
    from keelscope.diagnosis import diagnose
    from keelscope.store.reader import Run, open_run

    if isinstance(target, str | Path | Run):
        if batch is not None or loss_fn is not None or options:
            raise UsageError("a recorded run takes neither batch nor loss_fn: its numbers are in the file.")
        return diagnose(target if isinstance(target, Run) else open_run(target))
    return diagnose(record_once(target, batch, loss_fn, **options))


def record_once(model: nn.Module, batch: object, loss_fn: LossFunction | None = None, **options: Any) -> Run:
    """One forward and backward of a model as a run in memory.

    Args:
        model: any module.
        batch: see `report`.
        loss_fn: see `report`.
        options: `probes` (default: those of `keelscope.watch` and ``"sublayers"``), `sites` and `config` as in
            `keelscope.watch`.

    Returns:
        A run with one row.

    Raises:
        UsageError: if `model` is no module.
        NothingToObserveError: if no parameter requires a gradient.
        BatchError: if the model raises on the batch.
        LossError: if the loss is not one real number that depends on the parameters.
    """
    from torch import nn

    from keelscope.onepass import backward, loss_of
    from keelscope.session import watch
    from keelscope.untouched import untouched

    if not isinstance(model, nn.Module):
        raise UsageError(f"report() takes a torch.nn.Module, a run or a run file; got {type(model).__name__}.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise NothingToObserveError(
            f"no parameter of {type(model).__name__} requires a gradient; set requires_grad_(True) on those to observe."
        )
    options = {"probes": ("default", "sublayers"), **options}
    with untouched(model), _attention_for(options["probes"]):
        with watch(model, **options) as session:
            loss = loss_of(model, batch, loss_fn)
            session.log(loss=loss)
            backward(loss)
            session.step()
        return session.run


def _attention_for(probes: Any) -> AbstractContextManager[None]:
    """Attention with a second derivative, which fused kernels lack, where a probe takes one."""
    from keelscope.probe import resolve_probes

    if not any(getattr(probe, "forward_products", False) for probe in resolve_probes(probes)):
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)
