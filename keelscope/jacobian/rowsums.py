"""Sums over the entries of rows: in float64, with weights that differ from channel to channel, in cache-sized pieces.

`closed_forms` builds its closed forms from them. A few numbers per row are left over, and these are handled in
numpy on the CPU, where an operation on so few costs a third.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.linalg import vector_norm

from keelscope.jacobian.norms import Numbers

__all__ = ["TINY", "Sums", "in_pieces", "numbers", "over_rows", "square_sum", "tensor", "weighted"]

TINY = 1e-300
"""Added to a square that may be 0, in a row without direction."""

Sums = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
"""Rows, a second tensor like them, folded weights -> sums ``[row]``."""

_CACHED_PIECE = 1 << 17
_DEVICE_PIECE = 1 << 24


def numbers(values: Tensor) -> Numbers:
    """One number per row, in the library that is quick with a few of them."""
    return values.numpy() if values.is_cpu else values


def tensor(values: Numbers) -> Tensor:
    """Back from `numbers`."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def over_rows(values: Tensor, rows: Tensor) -> Tensor:
    """One value per repeat, as one per row; a single one stays ``[1]``."""
    repeat, count = values.shape[0], rows.shape[0]
    return values if repeat in {1, count} else values.repeat(count // repeat)


def weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Sums over the entries of rows ``[row, entry]`` with folded weights ``[repeat, width]``; ``[row]``."""
    repeat, width = weights.shape
    if width == 1:
        return values.sum(1) * over_rows(weights[:, 0], values)
    if repeat == 1 and width == values.shape[1]:
        return torch.mv(values, weights[0])
    places = values.reshape(-1, repeat, width, values.shape[1] // width).sum(3)
    return (places * weights).sum(2).reshape(-1)


def in_pieces(of: Sums, rows: Tensor, second: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    """Sums of whole rows, taken in pieces that fit the processor's cache; `second` is like `rows`."""
    limit = _CACHED_PIECE if rows.is_cpu else _DEVICE_PIECE
    count, repeat = rows.shape[0], weights.shape[0]
    if rows.numel() <= limit:
        return of(rows, second, weights)
    step = max(1, limit // rows.shape[1])
    own = repeat == count > 1  # each row has its weights
    step = step if own else max(step // repeat, 1) * repeat
    cuts = [slice(at, at + step) for at in range(0, count, step)]
    found = [of(rows[cut], second[cut], weights[cut] if own else weights) for cut in cuts]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def square_sum(rows: Tensor) -> Tensor:
    """Sum of the squares of each row ``[row, entry]``."""
    norm: Tensor = vector_norm(rows, dim=1)
    return norm.square_()
