"""The first 48 bytes of an HDF5 file: whether it is closed, being written, or cut off, read without HDF5.

Layout and checksum follow the HDF5 file format specification 3.0, section II.A (superblock versions 2 and 3):
signature, version, sizes, consistency flags at byte 11, base address, extension address, end of file at 28..36, root
address, and Bob Jenkins' lookup3 checksum of the first 44 bytes. `opening` decides by it how to open a run file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

__all__ = ["CLOSED", "SIZE", "WRITING", "WRITING_SWMR", "Superblock", "lookup3", "parse", "repaired"]

SIGNATURE: Final = b"\x89HDF\r\n\x1a\n"
SIZE: Final = 48
CLOSED: Final = 0
WRITING: Final = 1
WRITING_SWMR: Final = 5
_MASK: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the superblock says about the state of the file."""

    version: int
    flags: int
    """0 closed, 1 open for writing, 5 open for writing with SWMR readers."""
    end_of_file: int
    """Size the file had when the superblock was last written, in bytes."""
    sound: bool
    """Whether the checksum fits."""


def parse(head: bytes) -> Superblock | None:
    """Read a superblock.

    Args:
        head: the first bytes of a file, at least 48 of them if it has as many.

    Returns:
        The superblock, or None if these bytes do not start an HDF5 file of superblock version 2 or 3.
    """
    if len(head) < SIZE or not head.startswith(SIGNATURE) or head[8] not in {2, 3} or head[9] != 8:
        return None
    (end_of_file,) = struct.unpack_from("<Q", head, 28)
    (checksum,) = struct.unpack_from("<I", head, 44)
    return Superblock(head[8], head[11], end_of_file, checksum == lookup3(head[:44]))


def repaired(head: bytes, file_size: int) -> bytes:
    """The superblock of a file whose writer died, as its close would have left it.

    Args:
        head: the superblock as found.
        file_size: size of the file in bytes, which becomes the end of file.

    Returns:
        48 bytes with flags cleared, end of file set and checksum renewed.
    """
    fixed = bytearray(head[:SIZE])
    fixed[11] = CLOSED
    struct.pack_into("<Q", fixed, 28, file_size)
    struct.pack_into("<I", fixed, 44, lookup3(bytes(fixed[:44])))
    return bytes(fixed)


def lookup3(data: bytes) -> int:
    """Bob Jenkins' lookup3 hash (hashlittle, initial value 0), the checksum of HDF5 metadata.

    Args:
        data: any bytes.

    Returns:
        32-bit hash.

    Example:
        >>> hex(lookup3(b"Four score and seven years ago"))
        '0x17770551'
    """
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    while len(data) > 12:
        x, y, z = struct.unpack_from("<III", data)
        a, b, c = _mix((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)
        data = data[12:]
    if not data:
        return c
    x, y, z = struct.unpack("<III", data.ljust(12, b"\0"))
    return _final((a + x) & _MASK, (b + y) & _MASK, (c + z) & _MASK)


def _rotate(x: int, k: int) -> int:
    return ((x << k) | (x >> (32 - k))) & _MASK


def _mix(a: int, b: int, c: int) -> tuple[int, int, int]:
    for first, second, third in ((4, 6, 8), (16, 19, 4)):
        a = ((a - c) & _MASK) ^ _rotate(c, first)
        c = (c + b) & _MASK
        b = ((b - a) & _MASK) ^ _rotate(a, second)
        a = (a + c) & _MASK
        c = ((c - b) & _MASK) ^ _rotate(b, third)
        b = (b + a) & _MASK
    return a, b, c


def _final(a: int, b: int, c: int) -> int:
    for first, second, third in ((14, 11, 25), (16, 4, 14)):
        c = ((c ^ b) - _rotate(b, first)) & _MASK
        a = ((a ^ c) - _rotate(c, second)) & _MASK
        b = ((b ^ a) - _rotate(a, third)) & _MASK
    return ((c ^ b) - _rotate(b, 24)) & _MASK
