"""Whether a model runs compiled, however it was made so. torch._dynamo is not imported to find out."""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack
from types import FunctionType

import torch
from torch import nn

from keelscope.errors import CoverageWarning
from keelscope.instances import living

__all__ = ["Eager", "is_compiled", "is_tracing"]


class Eager:
    """Makes recorded steps of a compiled model run eager.

    Args:
        model: the watched model.
    """

    LATE = (
        "The model was compiled after watch() began: the first step shows its parameters only, and the structure of "
        "the model stays unknown. Compile it before."
    )

    def __init__(self, model: nn.Module) -> None:
        self._stance = ExitStack()
        self.is_compiled, self._entered = is_compiled(model), False
        """Whether the model was compiled when it was last looked at; whether recorded steps run eager now."""

    def begin(self) -> None:
        """A recorded step begins."""
        if self.is_compiled and not self._entered:
            self._entered = True
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))

    def end(self) -> None:
        """Let compiled code run again."""
        self._stance.close()
        self._entered = False

    def is_late(self, model: nn.Module) -> bool:
        """Whether a model of which no call was seen has been compiled meanwhile; that is said, once.

        Args:
            model: the watched model.

        Returns:
            The answer.
        """
        late = not self.is_compiled and is_compiled(model)
        if late:
            self.is_compiled = True
            warnings.warn(self.LATE, CoverageWarning, stacklevel=2)
        return late


def is_compiled(model: nn.Module) -> bool:
    """Whether forwards of the model may run compiled, so that hooks in it would be traced.

    Seen are ``torch.compile(model)``, ``model.compile()``, the same of a part or of a module around it, and methods
    that were replaced by compiled ones (``model.forward = torch.compile(model.forward)``, Lightning).

    Args:
        model: the watched model.

    Returns:
        Whether it does.
    """
    return any(_is_itself(module) for module in model.modules()) or _is_wrapped(model)


def _is_itself(module: nn.Module) -> bool:
    return (
        type(module).__name__ == "OptimizedModule"
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(isinstance(v, FunctionType) and hasattr(v, "_torchdynamo_orig_callable") for v in vars(module).values())
    )


def _is_wrapped(model: nn.Module) -> bool:
    """A wrapper knows its model, and not the other way round: looked up once among the live objects."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    ours = {id(module) for module in model.modules()}
    inner = (wrapper._modules.get("_orig_mod") for wrapper in living(dynamo.OptimizedModule))
    return any(not ours.isdisjoint(map(id, module.modules())) for module in inner if module is not None)


def is_tracing() -> bool:
    """Whether a forward that runs now is one of TorchScript or torch.compile, which keep what hooks do."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
