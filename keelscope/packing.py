"""Terms of many parameters at once, without the compiled kernel: as `keelscope.kernel.pack_all`.

A plan says where in one small buffer each tensor is widened; torch then copies all that fit in one call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelscope.entries import plainly
from keelscope.hostsums import host_moments, host_squares, squares_in_silence
from keelscope.kernel import COLUMNS, Routine
from keelscope.onhost import place_of
from keelscope.rooms import BLOCK, LENGTH, LINE, Room

__all__ = ["Packing"]

_PLANS = 8
_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


@dataclass(slots=True, eq=False)
class _Load:
    """What fits into the buffer at once."""

    tensors: list[int] = field(default_factory=list)
    views: list[Tensor] = field(default_factory=list)
    """The part of the buffer for each."""
    products: list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=list)
    """Lines of one length that follow each other, as rows and as columns, and where their squares go."""


@dataclass(slots=True, eq=False)
class _Plan:
    """How tensors of certain shapes are read."""

    counts: NDArray[np.float64]
    """``[tensor]``: number of entries."""
    loads: list[_Load] = field(default_factory=list)
    long: list[int] = field(default_factory=list)
    """Tensors that do not fit."""
    packed: list[int] = field(default_factory=list)
    """Tensors that do, as they follow each other."""
    lines: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """Sums of squares of their lines."""
    firsts: list[int] = field(default_factory=list)
    """The first line of each."""


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
        found = np.zeros((len(tensors), 2))
        with self._lock, torch.no_grad(), np.errstate(all="ignore"):
            plan = self._plans.get(key) or self._planned(key)
            found[:, 0] = plan.counts
            for load in plan.loads:
                torch._foreach_copy_(load.views, [tensors[i] for i in load.tensors])
                for rows, columns, squares in load.products:
                    np.matmul(rows, columns, squares)
            if plan.packed:
                found[plan.packed, 1] = np.add.reduceat(plan.lines, plan.firsts)
            for i in plan.long:
                place = place_of(tensors[i])
                found[i, 1] = 0.0 if place is None else squares_in_silence(place, self._room)
                left += [i] if place is None else []
        return found, left

    def _planned(self, shapes: tuple[torch.Size, ...]) -> _Plan:
        counts = [shape.numel() for shape in shapes]
        plan, used = _Plan(np.array(counts, dtype=np.float64)), 0
        plan.long = [i for i, count in enumerate(counts) if count > BLOCK]
        plan.packed = sorted((i for i, count in enumerate(counts) if 0 < count <= BLOCK), key=counts.__getitem__)
        with plainly():
            buffer = torch.from_numpy(self._room.wide)
            for i in plan.packed:
                count = counts[i]
                if not plan.loads or used + count > BLOCK:
                    used = 0
                    plan.loads.append(_Load())
                plan.loads[-1].tensors.append(i)
                plan.loads[-1].views.append(buffer[used : used + count].view(shapes[i]))
                used += count
        self._lay_lines(plan, counts)
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        self._plans[shapes] = plan
        return plan

    def _lay_lines(self, plan: _Plan, counts: list[int]) -> None:
        """Cut what is in the buffer into lines: those of one length that follow each other take one call."""
        lengths = {i: _lengths(counts[i]) for i in plan.packed}
        ends = np.cumsum([len(lengths[i]) for i in plan.packed], dtype=int).tolist()
        plan.firsts, plan.lines, line = [0, *ends[:-1]], np.empty(ends[-1] if ends else 0), 0
        for load in plan.loads:
            at = 0
            for length, several in groupby(length for i in load.tensors for length in lengths[i]):
                number = len(list(several))
                rows = self._room.wide[at : at + number * length].reshape(number, 1, length)
                squares = plan.lines[line : line + number].reshape(number, 1, 1)
                load.products.append((rows, rows.transpose(0, 2, 1), squares))
                at, line = at + number * length, line + number

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


def _lengths(count: int) -> list[int]:
    """Of the lines of one tensor."""
    if count <= LENGTH:
        return [count]
    whole, rest = divmod(count, LINE)
    return [LINE] * whole + [rest] * bool(rest)
