"""The tensors inside any nesting of inputs or outputs, each with its path.

Containers are walked, never rebuilt: what a module returned reaches its caller as the same object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from keelscope.entries import is_measurable

__all__ = ["floating_leaves", "hookable"]

_MAX_DEPTH = 12


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


def hookable(tensor: Tensor, inputs: object) -> Tensor:
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
    sources = {id(leaf if leaf._base is None else leaf._base) for _, leaf in floating_leaves(inputs)}
    return tensor if id(base) in sources or not base.requires_grad else base
