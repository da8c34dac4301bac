"""How long the texts of a dataset are, found without reading them: HDF5 would allocate whatever the lengths say.

A text is stored as a reference of 16 bytes (length, heap, index) in the dataset and as bytes in a global heap; many
references can share one text, so that a small file could fill the memory. References lie in one piece in a live file,
in compressed chunks in a sealed one. Used by `allowlist`.
"""

from __future__ import annotations

import h5py
import numpy as np
from numpy.typing import NDArray

from keelscope.store.chunks import Peek, unpacked_chunks

__all__ = ["REFERENCE", "text_lengths"]

REFERENCE = 16
"""Bytes of one reference."""


def text_lengths(dataset: h5py.Dataset, peek: Peek) -> NDArray[np.int64]:
    """The lengths that the references of a dataset of text hold.

    Args:
        dataset: one-dimensional, of text, contiguous or in chunks, its filters and sizes checked.
        peek: reads bytes of the same file.

    Returns:
        ``[text]`` in bytes, with those in the part of a last chunk that is outside the dataset.

    Raises:
        ValueError: if they are missing or do not unpack.
    """
    pieces = list(unpacked_chunks(dataset, REFERENCE, peek)) if dataset.chunks else [_whole(dataset, peek)]
    return np.frombuffer(b"".join(pieces), "<u4")[:: REFERENCE // 4].astype(np.int64)


def _whole(dataset: h5py.Dataset, peek: Peek) -> bytes:
    place, size = dataset.id.get_offset(), dataset.shape[0] * REFERENCE
    found = peek(place, size) if place is not None else b""
    if len(found) != size:
        raise ValueError("they are not all in the file")
    return found
