"""Messages between a process and the one that reads run files for it: JSON, and numbers as they lie in memory.

The reading process may have been taken over by the file it reads, so nothing it sends is unpickled: records are rebuilt
field by field, and an array is as large as was asked for. Used by `isolated` and `serving`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import select
import struct
import time
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from keelscope.store.columns import Columns

__all__ = ["BrokenFrameError", "pack", "plain", "rebuilt", "receive", "send"]

_HEAD = struct.Struct("<QQ")
_MAX_TEXT = 256 * 2**20
_PIECE = 2**20
_T = TypeVar("_T")
_Reader: typing.TypeAlias = Callable[[Any], Any]


class BrokenFrameError(Exception):
    """The other side died, hung, or said something that is no message."""


def pack(message: Mapping[str, object], array: NDArray[np.generic] | None = None) -> list[memoryview]:
    """A message as bytes.

    Args:
        message: JSON values.
        array: goes along with it.

    Returns:
        The pieces to send, one after the other.
    """
    if array is not None:
        message = {**message, "dtype": array.dtype.str, "shape": array.shape}
    text = json.dumps(message, default=plain).encode()
    body = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array is not None else np.empty(0, np.uint8)
    return [memoryview(_HEAD.pack(len(text), body.nbytes) + text), body.data]


def send(descriptor: int, pieces: list[memoryview]) -> None:
    """Send a message.

    Args:
        descriptor: a pipe.
        pieces: from `pack`.

    Raises:
        OSError: if nobody reads it.
    """
    for piece in pieces:
        sent = 0
        while sent < len(piece):
            sent += os.write(descriptor, piece[sent : sent + _PIECE])


def receive(
    descriptor: int, most: int = 0, seconds: float | None = None
) -> tuple[dict[str, Any], NDArray[np.generic] | None]:
    """Wait for a message.

    Args:
        descriptor: a pipe.
        most: largest array in bytes.
        seconds: how long; None waits for ever.

    Returns:
        The message, and its array if it has one.

    Raises:
        BrokenFrameError: if it does not come whole and in time.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    size, body = _HEAD.unpack(_exactly(descriptor, _HEAD.size, deadline))
    if size > _MAX_TEXT or body > most:
        raise BrokenFrameError(f"a message of {size + body} bytes")
    text, content = _exactly(descriptor, size, deadline), _exactly(descriptor, body, deadline)
    try:
        message: dict[str, Any] = json.loads(bytes(text))
        array = np.frombuffer(content, message["dtype"]).reshape(message["shape"]) if "dtype" in message else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BrokenFrameError(str(error)) from error
    return message, array


def _exactly(descriptor: int, size: int, deadline: float | None) -> bytearray:
    content = bytearray(size)
    got = 0
    while got < size:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([descriptor], [], [], left)[0]:
            raise BrokenFrameError("it did not answer in time")
        part = os.readv(descriptor, [memoryview(content)[got : got + _PIECE]])
        if part == 0:
            raise BrokenFrameError("it has ended")
        got += part
    return content


def plain(value: Any) -> Any:
    """A record as JSON values; what JSON does not know becomes text.

    Args:
        value: a dataclass, columns of them, or anything.

    Returns:
        A mapping from field to value; a list of columns.
    """
    if dataclasses.is_dataclass(value):
        return {name: getattr(value, name) for name in _names(typing.cast("Hashable", type(value)))}
    return list(value) if isinstance(value, Columns) else str(value)


def rebuilt(kind: type[_T], value: Any) -> _T:
    """The record that `plain` took apart, every field checked.

    Args:
        kind: a dataclass with annotated fields.
        value: JSON values.

    Returns:
        The record.

    Raises:
        BrokenFrameError: if a field is missing or of another type.

    Example:
        >>> from keelscope.store.schema import Stack
        >>> told = {"path": "h", "kind": "Block", "length": 2, "sublayers": 0, "main": True, "chained": True}
        >>> rebuilt(Stack, told) == Stack("h", "Block", 2, main=True, chained=True)
        True
    """
    try:
        return kind(**{name: read(value[name]) for name, read in _readers(typing.cast("Hashable", kind))})
    except (KeyError, TypeError) as error:
        raise BrokenFrameError(f"{kind.__name__} without {error}") from error


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _readers(kind: Hashable) -> tuple[tuple[str, _Reader], ...]:
    """How the fields of a record are read: a run has thousands of records of a dozen kinds."""
    return tuple((name, _reader(hint)) for name, hint in typing.get_type_hints(kind).items())


def _reader(hint: Any) -> _Reader:
    """Makes what was annotated of a JSON value, or raises."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in {tuple, Sequence}:
        return functools.partial(_tuple, _reader(inner[0]))
    if origin is Mapping:
        return functools.partial(_mapping, _reader(inner[1]))
    if origin in {types.UnionType, typing.Union}:
        return functools.partial(_optional, _reader(inner[0]))
    if hint is object:
        return _anything
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(rebuilt, hint)
    return _number if hint is float else functools.partial(_plain, hint)


def _tuple(read: _Reader, value: Any) -> tuple[Any, ...]:
    return tuple(map(read, _plain(list, value)))


def _mapping(read: _Reader, value: Any) -> dict[str, Any]:
    return {str(key): read(item) for key, item in _plain(dict, value).items()}


def _optional(read: _Reader, value: Any) -> Any:
    return None if value is None else read(value)


def _anything(value: Any) -> Any:
    return value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int) else _plain(float, value)


def _plain(kind: type[_T], value: Any) -> _T:
    if isinstance(value, kind):
        return value
    raise BrokenFrameError(f"{value!r:.40} is no {kind.__name__}")
