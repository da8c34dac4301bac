"""Damaged and forged versions of run files, made from a seed: bytes, metadata with its checksum set right, objects.

Used by `test_fuzz`. `python mutations.py FOLDER FIRST LAST SECONDS` reads that many, for so long at most.
"""

from __future__ import annotations

import importlib.util
import io
import json
import random
import re
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from keelscope.errors import RunFileError, UsageError
from keelscope.store.reader import open_run
from keelscope.store.superblock import lookup3
from keelscope.store.writer import RunWriter

SIGNATURES = re.compile(rb"OHDR|OCHK|FRHP|FHDB|FHIB|EAHD|EAIB|EADB|EASB|FAHD|FADB|BTHD|BTIN|BTLF|FSHD|FSSE")
SHORTEST = 64  # bytes that every kind of change can work on
NUMBERS = [0, 1, 2, 7, 8, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 16, 2**64 - 1]
JSON = ["[]", "{}", "null", "1e999", "NaN", "[NaN]", '{"a": Infinity}', '"x"', "[" * 5000, '{"a":' * 5000, "\\", ""]
JSON += ['[{"path": "a", "kind": "b", "length": 1e400, "sublayers": 1, "main": 1}]', "[[[[]]]]", "1" * 5000, "[-1e308]"]
DEAD = 1


def runs_of_the_tests() -> Any:
    """The module `conftest` beside this one, which has a name of its own under pytest."""
    spec = importlib.util.spec_from_file_location("store_records", Path(__file__).with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def base_files(folder: Path) -> list[bytes]:
    """A closed file, one whose writer died, and one with compressed numbers and names, as a sealed file has them."""
    records = runs_of_the_tests()
    layout = records.make_layout(3)
    writer = RunWriter(folder / "base.h5", layout)
    for step in range(5):
        writer.append(records.make_row(layout, step))
    writer.flush()
    dead = writer.path.read_bytes()
    writer.close()
    closed = writer.path.read_bytes()
    return [closed, dead, compressed(closed)]


def compressed(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with h5py.File(io.BytesIO(content)) as old, h5py.File(buffer, "w", libver=("v110", "v110")) as new:
        new.attrs.update(old.attrs)

        def copy(name, item):
            if isinstance(item, h5py.Group):
                new.create_group(name).attrs.update(item.attrs)
                return
            text = h5py.check_string_dtype(item.dtype) is not None
            chunks = tuple(max(1, size) for size in item.shape)
            options = {"compression": "gzip", "shuffle": True, "fletcher32": not text, "maxshape": item.maxshape}
            made = new.create_dataset(name, data=item[()], dtype=item.dtype, chunks=chunks, **options)
            made.attrs.update({k: v for k, v in item.attrs.items() if k not in {"DIMENSION_LIST", "REFERENCE_LIST"}})

        old.visititems(copy)
    return buffer.getvalue()


def metadata_of(content: bytes, share: int) -> list[tuple[int, int]]:
    """Place and size, without the checksum, of pieces of metadata that have one."""
    found = []
    for match in list(SIGNATURES.finditer(content))[::share]:
        place = match.start()
        sums = prefix_sums(content[place : place + 600])
        stored = [int.from_bytes(content[place + size : place + size + 4], "little") for size in range(8, 600)]
        fits = np.flatnonzero(sums == np.array(stored, np.uint32))
        found += [(place, 8 + int(fits[0]))] if fits.size else []
    return found


def prefix_sums(data: bytes) -> np.ndarray:
    """`lookup3` of the first 8, 9, ... 599 bytes, all at once."""
    sizes = np.arange(8, 600, dtype=np.uint32)
    a = b = c = np.uint32(0xDEADBEEF) + sizes
    done = np.zeros_like(sizes)
    padded = np.frombuffer(data.ljust(612, b"\0"), np.uint8)

    def words(at, keep):
        tail = padded[at : at + 12] * (np.arange(12) < keep[:, None])
        return np.ascontiguousarray(tail, np.uint8).view("<u4").T

    def rotated(x, k):
        return (x << np.uint32(k)) | (x >> np.uint32(32 - k))

    for at in range(0, 588, 12):
        more = sizes > at + 12
        last = (sizes > at) & ~more
        x, y, z = words(at, np.clip(sizes.astype(int) - at, 0, 12))
        a, b, c = a + x, b + y, c + z
        p, q, r = a, b, c
        for first, second, third in ((4, 6, 8), (16, 19, 4)):
            p = (p - r) ^ rotated(r, first)
            r = r + q
            q = (q - p) ^ rotated(p, second)
            p = p + r
            r = (r - q) ^ rotated(q, third)
            q = q + p
        u, v, w = a, b, c
        for first, second, third in ((14, 11, 25), (16, 4, 14)):
            w = (w ^ v) - rotated(v, first)
            u = (u ^ w) - rotated(w, second)
            v = (v ^ u) - rotated(u, third)
        w = (w ^ v) - rotated(v, 24)
        a, b, c = p, q, r
        done = np.where(last, w, done)
    return done


class Mutator:
    """Makes mutation number `seed` of one of the base files."""

    def __init__(self, bases: list[bytes], share: int = 1) -> None:
        self.bases = bases
        self.metadata = [metadata_of(base, share) for base in bases]

    def make(self, seed: int) -> bytes:
        chance = random.Random(seed)
        which = chance.randrange(len(self.bases))
        content = bytearray(self.bases[which])
        kinds = [self.flip, self.number, self.number, self.number, self.swap, self.heap, self.zeros, self.cut]
        if (
            which != DEAD and chance.random() < 0.3
        ):  # on whole files only: HDF5 that writes to damaged ones can crash the mutator
            content = self.object(content, chance)
        for _ in range(chance.choice([0, 1, 1, 1, 2, 4])):
            if len(content) < SHORTEST:  # cut already, to what no further change makes stranger
                break
            content = chance.choice(kinds)(content, self.metadata[which], chance)
        if chance.random() < 0.1:
            content[44:48] = struct.pack("<I", lookup3(bytes(content[:44])))
        return bytes(content)

    @staticmethod
    def seal(content: bytearray, place: int, size: int) -> None:
        content[place + size : place + size + 4] = struct.pack("<I", lookup3(bytes(content[place : place + size])))

    def flip(self, content, metadata, chance):
        place = chance.randrange(len(content))
        content[place] ^= 1 << chance.randrange(8)
        return content

    def number(self, content, metadata, chance):
        """A number in a piece of metadata becomes another, or the address of something, and its checksum fits."""
        place, size = chance.choice(metadata)
        width = chance.choice([1, 1, 2, 4, 8])
        at = place + chance.randrange(4, max(5, size - width + 1))
        values = [*NUMBERS, len(content), place, chance.choice(metadata)[0], chance.randrange(len(content))]
        content[at : at + width] = (chance.choice(values) % 256**width).to_bytes(width, "little")
        if chance.random() < 0.95:
            self.seal(content, place, size)
        return content

    def swap(self, content, metadata, chance):
        """One piece of metadata is written over another."""
        (place, size), (other, room) = chance.choice(metadata), chance.choice(metadata)
        size = min(size + 4, len(content) - other)
        content[other : other + size] = content[place : place + size]
        if chance.random() < 0.5:
            self.seal(content, other, room)
        return content

    def heap(self, content, metadata, chance):
        """Sizes and lengths of a global heap, and references into it, have no checksum."""
        heaps = [found.start() for found in re.finditer(b"GCOL", content)]
        if heaps:
            place = chance.choice(heaps) + 4 + chance.randrange(0, 4096)
            width = chance.choice([1, 2, 4, 8])
            content[place : place + width] = (chance.choice(NUMBERS) % 256**width).to_bytes(width, "little")
        return content

    def zeros(self, content, metadata, chance):
        place, size = chance.randrange(48, len(content)), chance.choice([4, 64, 512, 4096])
        content[place : place + size] = bytes(len(content[place : place + size]))
        return content

    def cut(self, content, metadata, chance):
        return content[: chance.randrange(len(content))] if chance.random() < 0.5 else content + bytes(4096)

    def object(self, content, chance):
        """An object or attribute becomes another by way of HDF5 itself."""
        buffer = io.BytesIO(content)
        try:
            with h5py.File(buffer, "r+", libver=("v110", "v110")) as file:
                chance.choice([change_attribute, change_attribute, change_dataset, change_link])(file, chance)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError):
            return content
        return bytearray(buffer.getvalue())


def names_in(file):
    groups = ["gradients", "parameters", "scalars", "coverage"]
    return ["status", *(f"{group}/{name}" for group in groups if group in file for name in file[group])]


def change_attribute(file, chance):
    owner = file[chance.choice(["/", "/", "gradients", "scalars", *names_in(file)])]
    name = chance.choice(list(owner.attrs) or ["x"])
    values = [
        *JSON,
        0,
        -1,
        2**62,
        1.5,
        np.nan,
        np.ones(9),
        b"\xff\xfe",
        "a b c",
        "step step",
        "../x",
        "\x1b[2J",
        owner.ref,
    ]
    value = chance.choice(values)
    if isinstance(value, str) and chance.random() < 0.4 and isinstance(owner.attrs.get(name), str):
        old = owner.attrs[name]
        at = chance.randrange(len(old) + 1)
        value = old[:at] + chance.choice(['"', "}", "]", "1e999", "null", "\\ud800", "9" * 30, " "]) + old[at + 1 :]
    owner.attrs[name] = value


def change_dataset(file, chance):
    name = chance.choice(names_in(file))
    old = file[name]
    attributes = {k: v for k, v in old.attrs.items() if k not in {"DIMENSION_LIST", "REFERENCE_LIST", "CLASS", "NAME"}}
    shape = tuple(chance.choice([0, 1, 2, size, size + 1, 2**20]) for size in old.shape)
    dtypes = [old.dtype, "f8", "f4", "f2", "i8", "u1", "c16", "S4", "V3", h5py.string_dtype(), h5py.ref_dtype]
    dtypes += [h5py.vlen_dtype(np.dtype("i4")), h5py.enum_dtype({"a": 1}), np.dtype([("a", "f8")]), ">f8", "?"]
    options = chance.choice(
        [{}, {"compression": "gzip"}, {"compression": "lzf"}, {"shuffle": True}, {"fletcher32": True}]
    )
    del file[name]
    made = file.create_dataset(
        name, shape, chance.choice([old.dtype, *dtypes]), chunks=tuple(min(8, max(1, n)) for n in shape), **options
    )
    made.attrs.update(attributes)


def change_link(file, chance):
    name, other = chance.choice(names_in(file)), chance.choice(["/", *names_in(file)])
    target = chance.choice([file[other], h5py.SoftLink(other), h5py.ExternalLink("other.h5", "/x")])
    del file[name]
    if chance.random() < 0.8:
        file[name] = target


def read(path: Path) -> str:
    """Read all there is in a run file, as the report and the dashboard would; anything but our own errors gets out.

    Args:
        path: the file.

    Returns:
        ``"read"``, ``"refused"``, or ``"crashed"`` if HDF5 took the process that read it down.
    """
    try:
        with open_run(path, isolated=True) as run:
            for key in run.keys():  # noqa: SIM118 - a run is no mapping
                run.read(key, -200)
                run[key]
            for group in run.groups:
                run.observed(group)
            run.refresh()
            text = repr(run) + run._repr_html_()
    except (RunFileError, UsageError) as error:
        text = str(error)
        if "\n" in text or "Traceback" in text:
            raise AssertionError(text) from error
        return "crashed" if "HDF5 cannot read it (" in text else "refused"
    if "\x1b" in text:
        raise AssertionError(text)
    return "read"


def fuzz(folder: Path, seeds: range, seconds: float, share: int = 1) -> dict[str, Any]:
    """Read mutants until the time is up.

    Args:
        folder: where they are written.
        seeds: which ones.
        seconds: how long at most.
        share: use one in so many pieces of metadata; all take seconds to find.

    Returns:
        How many were read, refused or crashed HDF5; and the findings: what was none of these, by seed.
    """
    mutator, counts = Mutator(base_files(folder), share), {"read": 0, "refused": 0, "crashed": 0}
    findings: dict[int, str] = {}
    crashed: list[int] = []
    end = time.monotonic() + seconds
    for seed in seeds:
        path = folder / "mutant.h5"
        path.write_bytes(mutator.make(seed))
        try:
            outcome = read(path)
            counts[outcome] += 1
            crashed += [seed] if outcome == "crashed" else []
        except Exception as error:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            findings[seed] = f"{type(error).__name__} at {trace.name}:{trace.lineno}: {error}"[:300]
        if time.monotonic() > end:
            break
    return {**counts, "findings": findings, "crashed at": crashed}


if __name__ == "__main__":
    place, first, last, limit = sys.argv[1:]
    sys.stdout.write(json.dumps(fuzz(Path(place), range(int(first), int(last)), float(limit)), indent=1) + "\n")
