"""Where hooks leave their terms: small tensors on the device, brought to the host once per step.

Hooks of `keelscope.hooks` and `keelscope.parameters` call `put` and keep the slot; `keelscope.rows` turns slots into
values after one `fetch`. Stacking a few numbers per observation at the end costs less than writing each into a
preallocated row, and needs no guess of how often a module is called.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelscope import kernel
from keelscope.errors import ProbeError
from keelscope.statistics import Terms
from keelscope.unwinding import Breaks

__all__ = ["Board", "Fetched", "Slot", "gather"]

Slot = tuple[torch.device, Terms, int] | bytes
"""Device, terms, index; or the terms themselves as the compiled kernel gives them: packed doubles or integers."""
Fetched = dict[tuple[torch.device, Terms], NDArray[np.float64]]
"""Terms by device, ``[observation, column]``."""


class Board:
    """Terms of one step, still on their devices."""

    def __init__(self) -> None:
        self._parts: dict[tuple[torch.device, Terms], list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()
        self.reached = False
        """Whether a gradient has reached an output of the step."""
        self.breaks = Breaks()
        """In the graphs of the step."""

    @property
    def is_blank(self) -> bool:
        """Whether nothing has come to it."""
        return not self.reached and not self._parts

    def put(self, terms: Terms, tensors: tuple[Tensor, ...]) -> Slot:
        """Compute terms where the tensors are, without waiting for the device.

        Args:
            terms: what to compute.
            tensors: the observation; neither kept nor changed.

        Returns:
            Where the terms will be found after `fetch`.

        Raises:
            ProbeError: if the terms do not give one number per column.
        """
        if terms.routine is not None and len(tensors) == 1:
            packed = kernel.measure((terms, terms.routine), tensors[0])
            if packed is not None:
                return packed[terms]
        if terms.packs is not None:
            together = terms.packs(*tensors)
            if together is not None:
                return together
        if any(tensor.requires_grad for tensor in tensors):  # a view made from weights
            tensors = tuple(tensor.detach() for tensor in tensors)
        values = terms.of(*tensors)  # [column]
        if values.dim() != 1 or len(values) != len(terms.columns):
            raise ProbeError(f"terms {terms.name!r} gave shape {list(values.shape)}, expected [{len(terms.columns)}].")
        key = (values.device, terms)
        with self._lock:  # autograd calls hooks from one thread per device
            parts = self._parts[key]
            parts.append(values)
            return (*key, len(parts) - 1)

    def put_many(self, terms: Terms, tensors: list[Tensor]) -> list[Slot]:
        """`put` for many one-tensor observations, in one call per device where the terms know how.

        Args:
            terms: what to compute.
            tensors: one per observation.

        Returns:
            One slot per tensor, in order.
        """
        packed = [None] * len(tensors) if terms.routine is None else kernel.measure_all(terms.routine, tensors)
        left = [tensor for tensor, values in zip(tensors, packed, strict=True) if values is None]
        slots = iter(self._put_many(terms, left))
        return [next(slots) if values is None else values for values in packed]

    def _put_many(self, terms: Terms, tensors: list[Tensor]) -> list[Slot]:
        if terms.of_many is None or len({tensor.device for tensor in tensors}) != 1:
            return [self.put(terms, (tensor,)) for tensor in tensors]
        rows = terms.of_many(tensors).unbind()
        key = (rows[0].device, terms)
        with self._lock:
            start = len(self._parts[key])
            self._parts[key].extend(rows)
        return [(*key, start + row) for row in range(len(rows))]

    def fetch(self) -> Fetched:
        """Bring everything to the host, one transfer per device.

        Returns:
            ``[observation, column]`` for each device and terms.
        """
        by_device: dict[torch.device, list[tuple[tuple[torch.device, Terms], Tensor]]] = defaultdict(list)
        for key, values in self._parts.items():
            by_device[key[0]].append((key, torch.stack(values)))  # [observation, column]
        fetched: Fetched = {}
        for blocks in by_device.values():
            flat = torch.cat([block.reshape(-1) for _, block in blocks]).cpu().numpy()
            ends = np.cumsum([block.numel() for _, block in blocks])
            for (key, block), piece in zip(blocks, np.split(flat, ends[:-1]), strict=True):
                fetched[key] = piece.reshape(tuple(block.shape))
        return fetched


def gather(slots: Sequence[Slot], terms: Terms, fetched: Fetched) -> NDArray[np.float64]:
    """Look slots of one kind of terms up.

    Args:
        slots: what `Board.put` gave.
        terms: their terms.
        fetched: what `Board.fetch` gave.

    Returns:
        ``[slot, column]``.
    """
    packed = [slot for slot in slots if isinstance(slot, bytes)]
    if packed and len(packed) == len(slots) and len({len(slot) for slot in packed}) == 1:
        return _unpacked(b"".join(packed), len(slots) * len(terms.columns)).reshape(len(slots), -1)
    gathered = np.empty((len(slots), len(terms.columns)))
    for row, slot in enumerate(slots):
        gathered[row] = (
            _unpacked(slot, len(terms.columns)) if isinstance(slot, bytes) else fetched[slot[0], terms][slot[2]]
        )
    return gathered


_NARROW = {1: np.uint8, 2: np.uint16}


def _unpacked(packed: bytes, count: int) -> NDArray[np.float64]:
    """So many numbers; how wide they are tells their type."""
    return np.frombuffer(packed, _NARROW.get(len(packed) // max(1, count), np.float64)).astype(np.float64, copy=False)
