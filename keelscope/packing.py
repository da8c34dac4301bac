"""Terms of many parameters at once, without the compiled kernel: as `keelscope.kernel.pack_all`.

A plan says where in one small buffer each tensor is widened; torch then copies all that fit in one call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelscope.entries import plainly
from keelscope.hostsums import host_moments, host_squares, squares_in_silence
from keelscope.kernel import COLUMNS, Routine
from keelscope.onhost import place_of
from keelscope.rooms import BLOCK, LENGTH, Room

__all__ = ["Packing"]

_PLANS = 8
_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


@dataclass(slots=True, eq=False)
class _Load:
    """What fits into the buffer at once."""

    tensors: list[int] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)
    """The part of the buffer for each."""
    pieces: list[tuple[int, NDArray[np.float64]]] = field(default_factory=list)
    """The same in parts that are short enough for one product, with the tensor of each."""


@dataclass(slots=True, eq=False)
class _Plan:
    """How tensors of certain shapes are read."""

    counts: NDArray[np.float64]
    """``[tensor]``: number of entries."""
    loads: list[_Load] = field(default_factory=list)
    long: list[int] = field(default_factory=list)
    """Tensors that do not fit."""


class Packing:
    """The buffer, and plans for the sets of tensors that come again and again."""

    def __init__(self) -> None:
        self._room = Room()
        self._plans: dict[tuple[torch.Size, ...], _Plan] = {}
        self._lock = threading.Lock()

    def pack_all(self, routine: Routine, tensors: Sequence[Tensor]) -> tuple[NDArray[np.float64], list[int]]:
        """Take terms of many tensors.

        Args:
            routine: `Routine.MOMENTS` or `Routine.SQUARES`.
            tensors: any tensors.

        Returns:
            ``[tensor, column]``, and the places of those that are not read here.
        """
        kinds = {(type(tensor), tensor.dtype, tensor.layout, tensor.is_cpu) for tensor in tensors}
        if routine is Routine.SQUARES and all(map(_is_plain, kinds)):
            return self._squares(tensors)
        columns = COLUMNS[routine]
        found, left = np.zeros((len(tensors), columns.stop - columns.start)), []
        for i, tensor in enumerate(tensors):
            terms = self._squares_of(tensor) if routine is Routine.SQUARES else self._moments_of(tensor)
            if terms is None:
                left.append(i)
            else:
                found[i] = terms
        return found, left

    def _squares(self, tensors: Sequence[Tensor]) -> tuple[NDArray[np.float64], list[int]]:
        """Of tensors all of which lie in host memory."""
        key, left = tuple([tensor.shape for tensor in tensors]), []
        sums = [0.0] * len(tensors)
        with self._lock, torch.no_grad(), np.errstate(all="ignore"):
            plan = self._plans.get(key) or self._planned(key)
            for load in plan.loads:
                torch._foreach_copy_(load.views, [tensors[i] for i in load.tensors])
                for i, piece in load.pieces:
                    sums[i] += float(piece.dot(piece))  # floats of numpy take several times as long to add
            for i in plan.long:
                place = place_of(tensors[i])
                sums[i] = 0.0 if place is None else squares_in_silence(place, self._room)
                left += [i] if place is None else []
        found = np.empty((len(tensors), 2))
        found[:, 0], found[:, 1] = plan.counts, sums
        return found, left

    def _planned(self, shapes: tuple[torch.Size, ...]) -> _Plan:
        counts = [shape.numel() for shape in shapes]
        plan, used = _Plan(np.array(counts, dtype=np.float64)), 0
        with plainly():
            buffer = torch.from_numpy(self._room.wide)
            for i, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
                if count > BLOCK:
                    plan.long.append(i)
                    continue
                if not plan.loads or used + count > BLOCK:
                    used = 0
                    plan.loads.append(_Load())
                plan.loads[-1].tensors.append(i)
                plan.loads[-1].views.append(buffer[used : used + count].view(shape))
                plan.loads[-1].pieces += [(i, piece) for piece in _pieces(self._room.wide[used : used + count])]
                used += count
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        self._plans[shapes] = plan
        return plan

    def _squares_of(self, tensor: Tensor) -> tuple[int, float] | None:
        place = place_of(tensor)
        return None if place is None else (place[1], host_squares(place, self._room))

    def _moments_of(self, tensor: Tensor) -> NDArray[np.float64] | None:
        place = place_of(tensor)
        if place is None:
            return None
        return host_moments(place, self._room) if place[1] else np.zeros(6)


def _is_plain(kind: tuple[type, torch.dtype, torch.layout, bool]) -> bool:
    of, dtype, layout, is_cpu = kind
    return of is Tensor and dtype in _DTYPES and layout is torch.strided and is_cpu


def _pieces(entries: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    return [entries[at : at + LENGTH] for at in range(0, len(entries), LENGTH)]
