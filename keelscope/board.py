"""Where hooks leave their terms: small tensors on the device, brought to the host once per step.

Hooks of `keelscope.hooks` and `keelscope.parameters` call `put` and keep the slot; `keelscope.rows` turns slots into
values after one `fetch`. Stacking a few numbers per observation at the end costs less than writing each into a
preallocated row, and needs no guess of how often a module is called.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keelscope.statistics import Terms

__all__ = ["Board", "Fetched", "Slot"]

Slot = tuple[str, Terms, int]
"""Device, terms, index."""
Fetched = dict[tuple[str, Terms], NDArray[np.float64]]
"""Terms by device, ``[observation, column]``."""


class Board:
    """Terms of one step, still on their devices."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, Terms], list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def put(self, terms: Terms, tensors: tuple[Tensor, ...]) -> Slot:
        """Compute terms where the tensors are, without waiting for the device.

        Args:
            terms: what to compute.
            tensors: the observation; neither kept nor changed.

        Returns:
            Where the terms will be found after `fetch`.
        """
        with torch.no_grad():
            values = terms.of(*tensors)  # [column]
        key = (str(values.device), terms)
        with self._lock:  # autograd calls hooks from one thread per device
            parts = self._parts[key]
            parts.append(values)
            return (*key, len(parts) - 1)

    def fetch(self) -> Fetched:
        """Bring everything to the host, one transfer per device.

        Returns:
            ``[observation, column]`` for each device and terms.
        """
        by_device: dict[str, list[tuple[tuple[str, Terms], Tensor]]] = defaultdict(list)
        for key, values in self._parts.items():
            by_device[key[0]].append((key, torch.stack(values)))  # [observation, column]
        fetched: Fetched = {}
        for blocks in by_device.values():
            flat = torch.cat([block.reshape(-1) for _, block in blocks]).cpu().numpy()
            ends = np.cumsum([block.numel() for _, block in blocks])
            for (key, block), piece in zip(blocks, np.split(flat, ends[:-1]), strict=True):
                fetched[key] = piece.reshape(tuple(block.shape))
        return fetched
