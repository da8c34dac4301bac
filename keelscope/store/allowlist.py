"""Opens single objects of an untrusted HDF5 file, and only the kinds of object that a run file may hold.

HDF5 itself would follow links out of the file, read other files through external storage or virtual datasets, and
allocate whatever a file declares. `decoding` and `filesource` reach every object by name through the functions here;
nothing is searched or walked.
"""

from __future__ import annotations

import math

import h5py
import numpy as np

from keelscope.store.chunks import Peek, filters_of
from keelscope.store.texts import REFERENCE, text_lengths

__all__ = [
    "RefusedError",
    "check_link",
    "child_dataset",
    "child_group",
    "int_attribute",
    "read_labels",
    "text_attribute",
]


_FILTERS = {h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_FLETCHER32}
_LAYOUTS = {h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS}
_MAX_CHUNK = 64 * 2**20
_SLACK = 64 * 2**20
_DEFLATE = 1100
_MAX_TEXT = 16 * 2**20
_MAX_ROWS = 2**25
_MAX_LABELS = 2**22


class RefusedError(Exception):
    """The file holds something that a run file may not hold; the message says what."""


def check_link(parent: h5py.Group, name: str, kind: type) -> None:
    """Refuse what is not an object of this file.

    Args:
        parent: an open group.
        name: a plain name.
        kind: `h5py.Group` or `h5py.Dataset`.

    Raises:
        RefusedError: if it is missing, of another kind, or reached by anything but a hard link.
    """
    label = f"{parent.name.rstrip('/')}/{name}"
    link = parent.get(name, getlink=True)
    if link is None:
        raise RefusedError(f"{label} is missing")
    if not isinstance(link, h5py.HardLink):
        raise RefusedError(f"{label} is a link to somewhere else")
    if parent.get(name, getclass=True) is not kind:
        raise RefusedError(f"{label} is not a {kind.__name__.lower()}")


def child_group(parent: h5py.Group, name: str) -> h5py.Group:
    """A group directly inside another.

    Args:
        parent: an open group.
        name: a plain name.

    Returns:
        The group.

    Raises:
        RefusedError: if it is missing, not a group, or reached by anything but a hard link.
    """
    check_link(parent, name, h5py.Group)
    return parent[name]


def child_dataset(parent: h5py.Group, name: str, kinds: str, ndim: int) -> h5py.Dataset:
    """A dataset directly inside a group, of the expected kind and of believable size.

    Args:
        parent: an open group.
        name: a plain name.
        kinds: accepted kinds as in `numpy.dtype.kind`, ``"O"`` standing for UTF-8 text.
        ndim: number of axes.

    Returns:
        The dataset; reading any slice of it touches this file only.

    Raises:
        RefusedError: if it is anything else.
    """
    check_link(parent, name, h5py.Dataset)
    dataset = parent[name]
    label = f"{parent.name.rstrip('/')}/{name}"
    plist = dataset.id.get_create_plist()
    if plist.get_layout() not in _LAYOUTS or plist.get_external_count() > 0:
        raise RefusedError(f"{label} keeps its data outside the file")
    filters = {number for number, _ in filters_of(dataset)}
    if not filters <= _FILTERS:
        raise RefusedError(f"{label} uses a filter that run files do not use")
    is_text = h5py.check_string_dtype(dataset.dtype) is not None
    kind = "O" if is_text else dataset.dtype.kind
    if kind not in kinds or (kind == "O" and not is_text) or dataset.dtype.itemsize > 16 or dataset.ndim != ndim:
        raise RefusedError(
            f"{label} has type {dataset.dtype} and {dataset.ndim} axes, which run files do not have there"
        )
    if dataset.shape[0] > _MAX_ROWS:
        raise RefusedError(f"{label} declares {dataset.shape[0]} rows, more than a run file holds")
    _check_size(dataset, label, bool(filters))
    return dataset


def read_labels(parent: h5py.Group, name: str, peek: Peek) -> list[str]:
    """All entries of a one-dimensional dataset of text.

    Entries can share one stored text, so that a small file could fill the memory: their lengths are added up first.

    Args:
        parent: an open group.
        name: a plain name.
        peek: reads bytes of the same file.

    Returns:
        The texts.

    Raises:
        RefusedError: if it is not such a dataset, or its texts add up to more than a run file holds.
    """
    dataset = child_dataset(parent, name, "O", 1)
    if len(dataset) > _MAX_LABELS:
        raise RefusedError(f"{dataset.name} has {len(dataset)} texts, more than a run file holds")
    try:
        total = text_lengths(dataset, peek).sum(dtype=np.int64)
    except (ValueError, OSError, RuntimeError) as error:
        raise RefusedError(f"the texts of {dataset.name} are damaged or missing: {error}") from error
    if total > _MAX_TEXT:
        raise RefusedError(f"the texts of {dataset.name} are too long")
    labels: list[str] = dataset.asstr(errors="replace")[()].tolist()
    return labels


def text_attribute(owner: h5py.Group | h5py.Dataset, name: str, default: str | None = None) -> str:
    """A text attribute.

    Args:
        owner: an open group or dataset.
        name: its name.
        default: what to return if it is missing.

    Returns:
        The text.

    Raises:
        RefusedError: if it is missing without a default, not one text, or over 16 MiB.
    """
    value = _attribute(owner, name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise RefusedError(f"attribute {name} of {owner.name} is missing or not text")
    return value


def int_attribute(owner: h5py.Group | h5py.Dataset, name: str, default: int) -> int:
    """An integer attribute.

    Args:
        owner: an open group or dataset.
        name: its name.
        default: what to return if it is missing.

    Returns:
        The number.

    Raises:
        RefusedError: if it is not one integer.
    """
    value = _attribute(owner, name)
    if value is None:
        return default
    if not isinstance(value, np.integer):
        raise RefusedError(f"attribute {name} of {owner.name} is not an integer")
    return int(value)


def _attribute(owner: h5py.Group | h5py.Dataset, name: str) -> object:
    if name not in owner.attrs:
        return None
    handle = h5py.h5a.open(owner.id, name.encode())
    allowed = h5py.check_string_dtype(handle.dtype) is not None or handle.dtype.kind in "iu"
    if not allowed or handle.shape != () or handle.get_storage_size() > _MAX_TEXT:
        raise RefusedError(f"attribute {name} of {owner.name} is neither text nor an integer")
    value = owner.attrs[name]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _check_size(dataset: h5py.Dataset, label: str, compressed: bool) -> None:
    stored = dataset.id.get_storage_size()
    itemsize = REFERENCE if dataset.dtype.kind == "O" else dataset.dtype.itemsize
    chunk = math.prod(dataset.chunks or (0,)) * itemsize
    declared = math.prod(dataset.shape) * itemsize
    if chunk > _MAX_CHUNK or declared > stored * (_DEFLATE if compressed else 1) + _SLACK:
        raise RefusedError(f"{label} declares {declared} bytes but stores {stored}")
