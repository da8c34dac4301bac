"""Reads compressed chunks without HDF5's own filters, which unpack whatever the stored bytes say, however much that is.

A few KiB of deflate can hold gigabytes. Here a chunk is unpacked to the size it should have and no further, and of the
shuffled bytes only those of the rows and sites that are wanted are put in order. The Adler-32 sum inside deflate tells
damage; the Fletcher-32 sum after it is only asked whether a chunk that unpacks to something else was made so.
`allowlist` and `filesource` read through `read_block`.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import h5py
import numpy as np
from numpy.typing import NDArray

__all__ = ["DamagedChunkError", "Peek", "filters_of", "read_block", "unpacked_chunks"]

Peek: TypeAlias = Callable[[int, int], bytes]
"""Reads ``(place, size)`` of the bytes of a file."""

_CHECKSUM = 4
_SINGLY = 16


class DamagedChunkError(ValueError):
    """The bytes of a chunk are not those that were written."""


def filters_of(dataset: h5py.Dataset) -> list[tuple[int, tuple[int, ...]]]:
    """The filters of a dataset, in the order in which they were applied.

    Args:
        dataset: an open dataset.

    Returns:
        Number and parameters of each.
    """
    plist = dataset.id.get_create_plist()
    found = (plist.get_filter(index) for index in range(plist.get_nfilters()))
    return [(number, tuple(values)) for number, _, values, _ in found]


def read_block(dataset: h5py.Dataset, place: Sequence[slice], peek: Peek) -> NDArray[np.generic]:
    """A block of numbers of a dataset.

    Args:
        dataset: with filters as `allowlist` allows them.
        place: slices of step 1 for the leading axes.
        peek: reads bytes of the same file.

    Returns:
        The numbers, in the shape that ``dataset[place]`` has.

    Raises:
        ValueError: if a chunk does not unpack to what it should hold.
    """
    if all(number != h5py.h5z.FILTER_DEFLATE for number, _ in filters_of(dataset)):
        plain: NDArray[np.generic] = dataset[tuple(place)]
        return plain
    full = (*place, *(slice(None) for _ in dataset.shape[len(place) :]))
    ranges = [range(*part.indices(size)) for part, size in zip(full, dataset.shape, strict=True)]
    block = np.full([len(one) for one in ranges], dataset.fillvalue, dataset.dtype)
    tiles = [_tiles(one, step) for one, step in zip(ranges, dataset.chunks, strict=True)]
    find = _finder(dataset, math.prod(map(len, tiles)))
    for tile in itertools.product(*tiles) if block.size else ():
        offset, inside, target = zip(*tile, strict=True)
        chunk = _chunk(dataset, find(offset), inside, peek)
        if chunk is not None:
            block[target] = chunk
    return block


def _tiles(wanted: range, step: int) -> list[tuple[int, slice, slice]]:
    """Chunks along one axis: where each begins, its wanted part, and where that goes."""
    starts = range(wanted.start // step * step, wanted.stop, step)
    cuts = [(at, max(at, wanted.start), min(at + step, wanted.stop)) for at in starts]
    return [
        (at, slice(first - at, last - at), slice(first - wanted.start, last - wanted.start)) for at, first, last in cuts
    ]


def _finder(dataset: h5py.Dataset, count: int) -> Callable[[tuple[int, ...]], h5py.h5d.StoreInfo | None]:
    """Where the chunk at an offset lies. HDF5 goes through its whole index for each, so many are looked up at once."""
    if count <= _SINGLY:
        return dataset.id.get_chunk_info_by_coord  # type: ignore[no-any-return]
    found: dict[tuple[int, ...], h5py.h5d.StoreInfo] = {}
    dataset.id.chunk_iter(lambda info: found.__setitem__(info.chunk_offset, info))
    return found.get


def _chunk(
    dataset: h5py.Dataset, info: h5py.h5d.StoreInfo | None, inside: tuple[slice, ...], peek: Peek
) -> NDArray[np.generic] | None:
    """The wanted part of one chunk, None if it was never written."""
    if info is None or info.byte_offset is None:
        return None
    itemsize = dataset.dtype.itemsize
    content, shuffled = _unpacked(dataset, info, itemsize, peek)
    if not shuffled:
        plain: NDArray[np.generic] = np.frombuffer(content, dataset.dtype).reshape(dataset.chunks)[inside]
        return plain
    planes = np.frombuffer(content, np.uint8).reshape(itemsize, *dataset.chunks)[(slice(None), *inside)]
    ordered = np.ascontiguousarray(np.moveaxis(planes, 0, -1))
    entries: NDArray[np.generic] = ordered.view(dataset.dtype)[..., 0]
    return entries


def unpacked_chunks(dataset: h5py.Dataset, itemsize: int, peek: Peek) -> Iterator[bytes]:
    """The bytes of every stored chunk of a dataset.

    Args:
        dataset: in chunks, with filters as `allowlist` allows them.
        itemsize: bytes of a stored entry.
        peek: reads bytes of the same file.

    Yields:
        One chunk, its entries in order.

    Raises:
        ValueError: if a chunk does not unpack to what it should hold.
    """
    for index in range(dataset.id.get_num_chunks()):
        content, shuffled = _unpacked(dataset, dataset.id.get_chunk_info(index), itemsize, peek)
        yield np.frombuffer(content, np.uint8).reshape(itemsize, -1).T.tobytes() if shuffled else content


def _unpacked(dataset: h5py.Dataset, info: h5py.h5d.StoreInfo, itemsize: int, peek: Peek) -> tuple[bytes, bool]:
    """The bytes of a chunk, all filters but shuffling undone, the last one first; and whether they are shuffled."""
    size = math.prod(dataset.chunks) * itemsize
    if info.size > 2 * size + 4096:
        raise ValueError(f"a chunk of {dataset.name} takes {info.size} bytes to hold {size}")
    content, shuffled = peek(info.byte_offset, info.size), False
    for bit, (number, values) in reversed(list(enumerate(filters_of(dataset)))):
        if info.filter_mask >> bit & 1:
            continue
        if shuffled or (number == h5py.h5z.FILTER_SHUFFLE and values != (itemsize,)):
            raise ValueError(f"{dataset.name} is shuffled in a way that run files are not")
        if number == h5py.h5z.FILTER_FLETCHER32:
            content = content[:-_CHECKSUM]
        elif number == h5py.h5z.FILTER_DEFLATE:
            content = _inflated(content, size + _CHECKSUM)
        shuffled = number == h5py.h5z.FILTER_SHUFFLE
    if len(content) != size:
        kind = DamagedChunkError if _is_torn(dataset, peek(info.byte_offset, info.size)) else ValueError
        raise kind(f"a chunk of {dataset.name} does not unpack to {size} bytes")
    return content, shuffled


def _inflated(content: bytes, most: int) -> bytes:
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(content, most + 1)
    except zlib.error as error:
        raise DamagedChunkError(f"a chunk does not unpack: {error}") from error
    if not inflater.eof and len(found) <= most:
        raise DamagedChunkError("a chunk ends too early")
    return found


def _is_torn(dataset: h5py.Dataset, stored: bytes) -> bool:
    """Whether the last filter is a Fletcher-32 sum that does not fit the stored bytes."""
    if [number for number, _ in filters_of(dataset)][-1:] != [h5py.h5z.FILTER_FLETCHER32] or len(stored) < _CHECKSUM:
        return False
    body, noted = stored[:-_CHECKSUM], int.from_bytes(stored[-_CHECKSUM:], "little")
    words = np.frombuffer(body + b"\0" * (len(body) % 2), ">u2").astype(np.int64)
    weighted = words * (np.arange(len(words), 0, -1) % 65535)
    return (int(words.sum()) - (noted & 0xFFFF)) % 65535 != 0 or (int(weighted.sum()) - (noted >> 16)) % 65535 != 0
