"""The binary answer of the HTTP interface: a JSON header, then plain little-endian arrays.

Layout: ``uint32`` length of the header, the header in UTF-8 padded to 8 bytes, then each array padded to 8 bytes. The
header's ``arrays`` lists name, dtype and shape in order. `assets/wire.js` is the other end.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from keelscope_dashboards.levels import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["ABSENT", "INF", "NAN", "RESOLUTION", "ZERO", "encode_deviations", "pack"]

ZERO, NAN, ABSENT, INF = -32768, -32767, -32766, 32767
"""int16 codes of cells that hold no value."""
RESOLUTION = 0.001
"""Decades per unit, unless the range needs more."""
_TOP = 32760


def pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """One binary answer.

    Args:
        header: JSON values; ``arrays`` is added to it.
        arrays: by name; int64 is sent as float64, which browsers read exactly up to 2**53.

    Returns:
        The body.
    """
    wired = {name: _wired(array) for name, array in arrays.items()}
    listing = [[name, array.dtype.str, list(array.shape)] for name, array in wired.items()]
    text = json.dumps({**header, "arrays": listing}, separators=(",", ":")).encode()
    text += b" " * (-(4 + len(text)) % 8)
    blocks = [array.tobytes() for array in wired.values()]
    padded = [block + b"\0" * (-len(block) % 8) for block in blocks]
    return b"".join([len(text).to_bytes(4, "little"), text, *padded])


def _wired(array: NDArray[Any]) -> NDArray[Any]:
    kind = array.dtype.newbyteorder("<") if array.dtype != np.int64 else np.dtype("<f8")
    return np.ascontiguousarray(array, dtype=kind)


def encode_deviations(
    deviations: NDArray[np.float32], kinds: NDArray[np.uint8], resolution: float = RESOLUTION
) -> tuple[NDArray[np.int16], float]:
    """Deviations in 16 bits: at 0.001 decades a unit the error is at most 0.0005 decades up to 32 decades.

    Args:
        deviations: decades, any shape.
        kinds: `Kind` of the same shape.
        resolution: smallest unit; 0 makes the most of 16 bits, as values that are no decades need.

    Returns:
        Codes and decades per unit.

    Example:
        >>> codes, unit = encode_deviations(np.float32([-1.5, 0]), np.uint8([Kind.VALUE, Kind.ZERO]))
        >>> codes.tolist(), unit
        ([-1500, -32768], 0.001)
    """
    widest = float(np.abs(deviations).max(initial=0.0))
    unit = max(resolution, widest / _TOP) or RESOLUTION
    codes = np.rint(np.divide(deviations, unit, dtype=np.float64)).astype(np.int16)
    for kind, code in ((Kind.ZERO, ZERO), (Kind.NAN, NAN), (Kind.ABSENT, ABSENT), (Kind.INF, INF)):
        codes[kinds == kind] = code
    return codes, unit
