"""The tensors inside any nesting of inputs or outputs, each with its path.

Containers are walked, never rebuilt: what a module returned reaches its caller as the same object.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from keelscope.entries import is_measurable
from keelscope.unwinding import Breaks

__all__ = [
    "HAS_HOOK_DICTS",
    "Arguments",
    "Handles",
    "KeptInput",
    "floating_inputs",
    "floating_leaves",
    "hook_gradient",
    "hook_plainly",
    "hookable",
    "removed_with",
]

Arguments = tuple[tuple[object, ...], Mapping[str, object]]
"""Positional and keyword arguments of a call."""

_MAX_DEPTH = 12
HAS_HOOK_DICTS = hasattr(torch._C._FunctionBase, "_register_hook_dict")


def floating_leaves(value: object) -> list[tuple[str, Tensor]]:
    """Every real or complex tensor in tuples, lists, mappings, dataclasses and packed sequences, in order.

    Args:
        value: what a module takes or returns; HF ``ModelOutput`` and namedtuples included. Other objects are opaque.

    Returns:
        ``(path, tensor)`` pairs; the path of a bare tensor is ``""``, otherwise keys and indices joined by dots.

    Example:
        >>> import torch
        >>> output = {"h": [torch.ones(1), None], "n": torch.tensor(3), "a": torch.ones(1)}
        >>> [path for path, _ in floating_leaves(output)]
        ['h.0', 'a']
    """
    if type(value) is Tensor:
        return [("", value)] if is_measurable(value) else []
    return list(_walk(value, "", 0))


def floating_inputs(inputs: Arguments) -> list[Tensor]:
    """Tensors among the arguments of a call as `floating_leaves` finds them; at once where there is one argument.

    Args:
        inputs: positional and keyword arguments.

    Returns:
        The tensors.
    """
    args, kwargs = inputs
    if not kwargs and type(args) is tuple and len(args) == 1 and type(args[0]) is Tensor:
        return [args[0]] if is_measurable(args[0]) else []
    return [tensor for _, tensor in floating_leaves(inputs)]


def _walk(value: object, path: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if is_measurable(value):
            yield path, value
    elif depth < _MAX_DEPTH:
        for key, child in _children(value):
            yield from _walk(child, f"{path}.{key}" if path else key, depth + 1)


def _children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, PackedSequence):
        yield "data", value.data
    elif isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), child) for index, child in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))


def hookable(tensor: Tensor, inputs: Arguments) -> Tensor:
    """The tensor on which a gradient hook stays in the graph.

    Args:
        tensor: what a module returned.
        inputs: what it was given.

    Returns:
        The tensor, or the one that it is a full view of.
    """
    # A Linear with bias on 3-D input returns a full view of a base it made. An in-place operation on that view rewires
    # the graph past a hook set on the view, but not past one set on the base, which has the same entries.
    base = tensor._base
    if base is None or base.grad_fn is None or base.numel() != tensor.numel() or base.dtype != tensor.dtype:
        return tensor
    if not base.is_contiguous():
        return tensor
    sources = {id(leaf if leaf._base is None else leaf._base) for leaf in _tensors(inputs)}
    return tensor if id(base) in sources or not base.requires_grad else base


def _tensors(inputs: Arguments) -> list[Tensor]:
    """The floating tensors among the arguments of a call."""
    args, kwargs = inputs
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:
        return [args[0]]
    return [leaf for _, leaf in floating_leaves(inputs)]


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor], None], breaks: Breaks) -> RemovableHandle | None:
    """`Tensor.register_hook`, without a handle where the tensor goes with its graph: that takes half the time.

    Args:
        tensor: requires a gradient.
        hook: called with its gradient.
        breaks: told of the node that was looked at.

    Returns:
        A handle for a leaf, which outlives the step; None otherwise.
    """
    if hook_plainly(tensor, hook, breaks):
        return None
    node = tensor.grad_fn
    if node is not None:
        breaks.passed(node)
        hooks: Any = tensor._backward_hooks
        if hooks is not None and type(tensor) is Tensor:  # it comes after those that are there
            hooks[hook] = hook
            return None
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle if node is None else None


class Handles(list[RemovableHandle]):
    """Handles that are given back together, and which are none on most steps."""

    __slots__ = ()

    def close(self) -> None:
        """Give them back."""
        for handle in self:
            handle.remove()
        self.clear()


def removed_with(stack: ExitStack) -> list[RemovableHandle]:
    """A list of handles that are given back together: a callback for each would take more room than they do.

    Args:
        stack: gives them back when it is closed.

    Returns:
        The list, to be filled.
    """
    handles: list[RemovableHandle] = []

    def remove() -> None:
        for handle in handles:
            handle.remove()

    stack.callback(remove)
    return handles


def hook_plainly(tensor: Tensor, hook: Callable[[Tensor], None], breaks: Breaks) -> bool:
    """`hook_gradient` for tensors without hooks that go with their graph.

    Args:
        tensor: requires a gradient.
        hook: called with its gradient.
        breaks: told of the node that was looked at.

    Returns:
        Whether the hook was put; not on other tensors.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None or type(tensor) is not Tensor or not HAS_HOOK_DICTS:
        return False
    hooks: OrderedDict[Any, Any] = OrderedDict()
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)
    hooks[hook] = hook
    try:
        breaks.passed(node)
    except Exception:  # the hook is there, and the call is recorded
        return True
    return True


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class KeptInput:
    """An input that autograd keeps for backward anyway, to be looked at again when the gradient arrives."""

    tensor: Tensor
    version: int

    @classmethod
    def first_of(cls, inputs: Arguments) -> KeptInput | None:
        """The first floating tensor among a module's arguments."""
        leaf = next(iter(floating_inputs(inputs)), None)
        return None if leaf is None or leaf.is_inference() else cls(leaf.detach(), leaf._version)

    @property
    def unchanged(self) -> bool:
        """Whether nothing was written into it since."""
        return self.tensor._version == self.version
