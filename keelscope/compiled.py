"""Whether a model runs compiled, however it was made so. torch._dynamo is not imported to find out."""

from __future__ import annotations

import sys
from types import FunctionType

from torch import nn

from keelscope.instances import living

__all__ = ["is_compiled"]


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
