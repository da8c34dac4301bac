"""Reading the numbers of weights while a graph is alive: whether they are there, their mean, and dropout masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

__all__ = ["is_mask", "is_readable", "mean", "saved"]


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor's values are there, and looking at them runs no code of a subclass (a DTensor communicates).

    Args:
        tensor: any tensor.

    Returns:
        False for subclasses, tensors without data, and tensors whose storage was freed.

    Example:
        >>> is_readable(torch.ones(2)), is_readable(torch.ones(2, device="meta"))
        (True, False)
    """
    if type(tensor) not in {Tensor, nn.Parameter, nn.Buffer} or tensor.is_meta or tensor.layout != torch.strided:
        return False
    # FSDP frees the storage of whole parameters after the forward of a block, while the graph keeps the tensors.
    spread = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + spread + 1) * tensor.element_size()
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() >= needed


def mean(tensor: Tensor) -> float | None:
    """The mean of a tensor's entries.

    Args:
        tensor: any tensor that needs no gradient.

    Returns:
        The mean; None if the values are not there, or looking at them would run other code.
    """
    if not is_readable(tensor) or tensor.is_complex():
        return None
    if tensor.numel() == 1:
        return float(tensor)
    return float(tensor.mean(dtype=torch.promote_types(tensor.dtype, torch.float32)))


def saved(node: Node, attribute: str) -> Tensor | None:
    """What a node kept, unless getting it would run a hook.

    Args:
        node: the node.
        attribute: as autograd calls it, ``_saved_...``.

    Returns:
        The values, a plain number as a tensor; None where they are not there, or were written into since.
    """
    raw = getattr(node, attribute.replace("_saved", "_raw_saved"), None)
    if raw is None:  # a plain number
        number = getattr(node, attribute, None)
        return torch.tensor(number) if isinstance(number, int | float) else None
    if getattr(raw, "unpack_hook", raw) is not None:
        return None
    try:
        value = getattr(node, attribute)
    except RuntimeError:  # changed in place since, or freed by a backward pass
        return None
    return value.detach() if isinstance(value, Tensor) and is_readable(value) else None


def is_mask(tensor: Tensor) -> bool:
    """Whether the entries are 0 and one number of at least 1, as dropout multiplies with."""
    kept = tensor.max()
    zero = tensor == 0
    return bool(kept >= 1) and bool(zero.any()) and bool((zero | (tensor == kept)).all())
