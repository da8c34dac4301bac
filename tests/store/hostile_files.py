"""Files that are broken or made to do harm, one maker per kind. `KINDS` says what each must lead to.

A maker turns a good run file into a bad one, in place. Its message is what the refusal must say; None: the harm is
taken out and the rest is read.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np

from keelscope.store.superblock import lookup3, repaired

Maker = Callable[[Path], None]
KINDS: dict[str, tuple[Maker, str | None]] = {}
SECRET = "/etc/passwd"


def kind(message: str | None) -> Callable[[Maker], Maker]:
    def add(maker: Maker) -> Maker:
        KINDS[maker.__name__] = (maker, message)
        return maker

    return add


def changing(message: str | None) -> Callable[[Callable[[h5py.File], None]], Maker]:
    """A maker that changes the open file."""

    def add(change: Callable[[h5py.File], None]) -> Maker:
        def maker(path: Path) -> None:
            with h5py.File(path, "r+", libver=("v110", "v110"), locking=False) as file:
                change(file)

        maker.__name__ = change.__name__
        return kind(message)(maker)

    return add


def replace(file: h5py.File, name: str, **options: object) -> h5py.Dataset:
    attributes = {key: value for key, value in file[name].attrs.items() if key in {"units", "long_name", "extra_axes"}}
    del file[name]
    made = file.create_dataset(name, **options)
    made.attrs.update(attributes)
    return made


# Data from elsewhere


@changing("/gradients/norm keeps its data outside the file")
def external_storage(file):
    replace(file, "gradients/norm", shape=(20, 6), dtype="f8", external=[(SECRET, 0, 960)])


@changing("/gradients/position keeps its data outside the file")
def external_coordinates(file):
    replace(file, "gradients/position", shape=(6,), dtype="i4", external=[(SECRET, 0, 24)])


@changing("/gradients/norm keeps its data outside the file")
def virtual_dataset(file):
    virtual = h5py.VirtualLayout(shape=(20, 6), dtype="f8")
    virtual[:] = h5py.VirtualSource("/srv/secret.h5", "x", shape=(20, 6))
    del file["gradients/norm"]
    file.create_virtual_dataset("gradients/norm", virtual)


@changing("/gradients/norm keeps its data outside the file")
def virtual_dataset_of_itself(file):
    file["outside"] = h5py.Empty("f8")
    virtual = h5py.VirtualLayout(shape=(20, 6), dtype="f8")
    virtual[:] = h5py.VirtualSource(".", "gradients/norm", shape=(20, 6))
    del file["gradients/norm"]
    file.create_virtual_dataset("gradients/norm", virtual)


@changing("/gradients is a link to somewhere else")
def external_link_to_a_group(file):
    del file["gradients"]
    file["gradients"] = h5py.ExternalLink("/srv/other.h5", "/gradients")


@changing("/gradients/norm is a link to somewhere else")
def external_link_to_a_dataset(file):
    del file["gradients/norm"]
    file["gradients/norm"] = h5py.ExternalLink("/srv/other.h5", "/x")


@changing("/gradients/norm is a link to somewhere else")
def soft_link(file):
    file.move("gradients/norm", "elsewhere")
    file["gradients/norm"] = h5py.SoftLink("/elsewhere")


@changing("/scalars is a link to somewhere else")
def soft_link_to_itself(file):
    del file["scalars"]
    file["scalars"] = h5py.SoftLink("/scalars")


@changing("/gradients/norm is not a dataset")
def group_in_place_of_a_dataset(file):
    del file["gradients/norm"]
    file["gradients/norm"] = file["/"]


@changing(None)
def cyclic_hard_links(file):
    file["gradients/loop"] = file["/"]
    file["loop"] = file["gradients"]


@changing(None)
def three_thousand_groups_deep(file):
    at = file
    for _ in range(3000):
        at = at.create_group("g")


@changing(None)
def many_thousand_groups(file):
    for number in range(5000):
        file.create_group(f"extra{number}")


# Sizes that are not believed


@changing("declares")
def a_quintillion_rows(file):
    replace(file, "gradients/norm", shape=(2**57, 6), maxshape=(None, 6), chunks=(64, 6), dtype="f8")


@changing("declares")
def a_quintillion_steps(file):
    replace(file, "gradients/step", shape=(2**59,), maxshape=(None,), chunks=(64,), dtype="i8")


@changing("declares")
def a_trillion_sites(file):
    replace(file, "gradients/site", shape=(2**40,), dtype=h5py.string_dtype(), chunks=(64,))


@changing("declares|does not fit")
def a_trillion_quantiles(file):
    replace(file, "gradients/quantile", shape=(2**40,), dtype="f8", chunks=(64,))


@changing("declares")
def gigabyte_chunks(file):
    replace(file, "gradients/norm", shape=(20, 6), chunks=(20, 2**23), maxshape=(None, None), dtype="f8")


def write_bomb(dataset: h5py.Dataset, offset: tuple[int, ...]) -> None:
    """A chunk that unpacks to 1 GiB."""
    packer = zlib.compressobj(9)
    first, again = (packer.compress(bytes(2**22)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    content = first + 255 * again + packer.flush()
    dataset.id.write_direct_chunk(offset, content)


@changing("does not unpack to|takes .* bytes to hold")
def compression_bomb_in_values(file):
    write_bomb(
        replace(
            file, "gradients/norm", shape=(20, 6), chunks=(2**16, 6), maxshape=(None, 6), dtype="f8", compression=9
        ),
        (0, 0),
    )


@changing("does not unpack to|takes .* bytes to hold")
def compression_bomb_in_steps(file):
    write_bomb(
        replace(file, "scalars/step", shape=(20,), chunks=(2**17,), maxshape=(None,), dtype="i8", compression=9), (0,)
    )


@changing("the texts of /gradients/site are damaged or missing")
def compression_bomb_in_names(file):
    text = h5py.string_dtype()
    write_bomb(
        replace(file, "gradients/site", shape=(6,), chunks=(2**16,), maxshape=(None,), dtype=text, compression=9), (0,)
    )


@changing("position does not unpack|does not unpack to|takes .* bytes to hold")
def compression_bomb_in_positions(file):
    write_bomb(
        replace(file, "gradients/position", shape=(6,), chunks=(2**17,), maxshape=(None,), dtype="i4", compression=9),
        (0,),
    )


@kind("the texts of /gradients/site are too long")
def one_huge_text_shared_by_all_names(path):
    with h5py.File(path, "r+", libver=("v110", "v110"), locking=False) as file:
        made = replace(file, "gradients/site", data=["x" * 2**20] + ["y"] * 49, dtype=h5py.string_dtype())
        place = made.id.get_offset()
    content = bytearray(path.read_bytes())
    content[place : place + 50 * 16] = bytes(content[place : place + 16]) * 50
    path.write_bytes(content)


@kind("the texts of /gradients/site are too long")
def a_text_of_four_gigabytes(path):
    with h5py.File(path) as file:
        place = file["gradients/site"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[place : place + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(content)


@kind("is damaged")
def a_heap_without_end(path):
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL\x01")
    content[heap + 16 : heap + 32] = bytes(16)
    path.write_bytes(content)


@kind("is damaged")
def a_heap_of_an_exabyte(path):
    content = bytearray(path.read_bytes())
    heap = content.index(b"GCOL\x01")
    content[heap + 8 : heap + 16] = struct.pack("<Q", 2**60)
    path.write_bytes(content)


# Kinds of data that run files do not have


def with_dtype(name: str, dtype: object, shape: tuple[int, ...] = (20, 6)) -> None:
    def change(file):
        replace(file, "gradients/norm", shape=shape, dtype=dtype)

    change.__name__ = name
    changing("/gradients/norm has type")(change)


with_dtype("lists_of_numbers", h5py.vlen_dtype(np.dtype("f8")))
with_dtype("object_references", h5py.ref_dtype)
with_dtype("region_references", h5py.regionref_dtype)
with_dtype("compound", [("a", "f8"), ("b", "i4")])
with_dtype("enumeration", h5py.enum_dtype({"a": 1}, "i4"))
with_dtype("opaque", "V8")
with_dtype("arrays_in_entries", np.dtype(("f8", (3,))))
with_dtype("text_for_numbers", h5py.string_dtype())
with_dtype("complex_numbers", "c16")
with_dtype("too_many_axes", "f8", (20, 6, 1, 1, 1))


@changing("/gradients/norm has shape|does not fit its")
def fewer_columns_than_sites(file):
    replace(file, "gradients/norm", data=np.zeros((20, 5)))


@changing("do not fit each other")
def fewer_kinds_than_sites(file):
    replace(file, "gradients/kind", data=["a", "b"], dtype=h5py.string_dtype())


@changing("/gradients/norm uses a filter")
def filter_of_h5py(file):
    replace(file, "gradients/norm", data=np.zeros((20, 6)), chunks=(4, 6), compression="lzf")


@changing("/gradients/norm uses a filter")
def filter_of_a_plugin(file):
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((4, 6))
    plist.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))
    del file["gradients/norm"]
    h5py.h5d.create(file["gradients"].id, b"norm", h5py.h5t.IEEE_F64LE, h5py.h5s.create_simple((20, 6)), plist)


@changing("/gradients/observed uses a filter")
def filter_that_scales(file):
    replace(file, "gradients/observed", data=np.ones((20, 6), "u1"), chunks=(4, 6), scaleoffset=0)


# Attributes


def with_attribute(label: str, message: str | None, name: str, value: object, owner: str = "/") -> None:
    def change(file):
        if name in file[owner].attrs:
            del file[owner].attrs[name]
        file[owner].attrs[name] = value

    change.__name__ = label
    changing(message)(change)


with_attribute("attribute_of_many_numbers", "title of / is neither text", "title", np.ones(2**20))


@changing("title of / is neither text")
def attribute_of_references(file):
    file.attrs["title"] = np.array([file["gradients"].ref] * 3, dtype=h5py.ref_dtype)


with_attribute("attribute_with_a_pickle", "title of / is neither text", "title", np.void(pickle.dumps(print)))
with_attribute("attribute_of_17_megabytes", "run_config of / is missing or not text", "run_config", "x" * (17 * 2**20))
with_attribute("json_that_is_none", "run_config of / is not JSON", "run_config", "{")
with_attribute("json_a_million_deep", "run_config of / is not JSON", "run_config", "[" * 1_000_000)
with_attribute("json_with_a_huge_number", "run_config of / is not JSON", "run_config", "1" * 100_000)
with_attribute("json_nested_in_itself", None, "run_config", '{"a":' * 200 + "1" + "}" * 200)
with_attribute("json_with_nan_and_infinity", None, "run_config", '{"lr": NaN, "steps": Infinity, "depth": -Infinity}')
with_attribute("json_with_unpaired_surrogates", None, "run_config", '{"a": "\\ud800", "\\udfff": 1}')
with_attribute("json_stacks_of_infinite_length", "does not describe stacks", "stacks",
               '[{"path": "a", "kind": "b", "length": Infinity, "sublayers": 1, "main": true}]')  # fmt: skip
with_attribute("json_stacks_that_are_no_list", "stacks of / is not a list", "stacks", "{}")
with_attribute("json_sublayers_of_numbers", "does not describe sub-layers", "sublayers", "[1, 2, 3]")
with_attribute("json_provenance_that_is_a_list", "provenance of /gradients is not", "provenance", "[]", "gradients")
with_attribute("group_outside_the_file", "holds something that is not a name", "groups", "gradients ../../etc/passwd")
with_attribute("group_with_an_absolute_path", "holds something that is not a name", "groups", "/gradients")
with_attribute("group_that_is_missing", "/nothing is missing", "groups", "gradients nothing")
with_attribute("group_named_twice", "names something twice", "groups", "gradients gradients")
with_attribute("a_million_groups", "not a name", "groups", " ".join(f"g{number}" for number in range(1_000_000)))
with_attribute("statistic_named_twice", "names something twice", "statistics", "norm norm", "gradients")
with_attribute("statistic_that_is_a_coordinate", "has type|has shape|is not", "statistics", "site", "gradients")
with_attribute(
    "axes_without_end", "is missing|has type", "extra_axes", " ".join(f"a{n}" for n in range(40)), "gradients/norm"
)
with_attribute("number_that_is_text", "n_parameters of / is not an integer", "n_parameters", "many")
with_attribute("schema_that_is_no_number", "keelscope did not write it", "keelscope_schema", "one")
with_attribute("schema_without_end", "keelscope did not write it|has format", "keelscope_schema", "9" * 5000)
with_attribute("schema_of_a_newer_major", "its header was changed, so copy it again", "keelscope_schema", "2.0")
with_attribute("schema_of_a_newer_minor", None, "keelscope_schema", "1.99")
with_attribute(
    "title_that_controls_a_terminal", None, "title", "\x1b]0;evil\x07\x1b[2J\x9b31m<script>alert(1)</script>"
)
with_attribute("title_in_bytes_that_are_no_text", None, "title", np.bytes_(b"\xff\xfe\xfa"))


@changing(None)
def names_that_control_a_terminal(file):
    names = ["\x1b[2J", "../../../etc/passwd", "/etc/passwd", "<img src=x onerror=alert(1)>", "\u202eevil", "a\nb"]
    file["gradients/site"][:] = names


@changing(None)
def what_a_newer_minor_adds(file):
    file.create_group("overview_16")["x"] = np.ones(3)
    file["gradients"].attrs["novelty"] = np.ones(3)
    file["link"] = h5py.ExternalLink(SECRET, "/")
    file.create_dataset("outside", shape=(10,), dtype="u1", external=[(SECRET, 0, 10)])


# Rows


@changing(None)
def steps_that_go_back(file):
    file["scalars/step"][:3] = [5, 4, 6]


@changing(None)
def negative_steps(file):
    file["scalars/step"][:] = -np.arange(1, 21)


@changing("has type")
def steps_that_are_no_integers(file):
    replace(file, "scalars/step", data=np.linspace(0.0, 1.0, 20))


@changing(None)
def numbers_that_are_not_finite(file):
    file["gradients/norm"][:] = np.array([np.nan, np.inf, -np.inf, 5e-324, 1.7e308, -0.0])
    file["scalars/loss"][:] = np.nan
    file["scalars/wall_time"][:] = -np.inf


@changing("positions or sizes that no module has")
def positions_out_of_all_bounds(file):
    file["gradients/position"][:] = [-(2**31), 2**31 - 1, 0, 0, 0, 0]


@changing("positions or sizes that no module has")
def sites_of_negative_size(file):
    file["gradients/numel"][:] = -(2**63)


# Bytes


def cut_at(size: int | float) -> None:
    def maker(path):
        content = path.read_bytes()
        path.write_bytes(content[: size if isinstance(size, int) else int(len(content) * size)])

    maker.__name__ = f"cut_at_{size}"
    kind("is empty|is not an HDF5 file|not a run file of keelscope|is cut off|is damaged")(maker)


for number in (0, 1, 7, 8, 9, 12, 28, 36, 44, 47, 48, 49, 95, 96, 1000, 0.25, 0.5, 0.75, 0.999):
    cut_at(number)


def with_superblock(label: str, place: int, value: bytes, message: str) -> None:
    """Bytes of the superblock change, and its checksum fits."""

    def maker(path):
        content = bytearray(path.read_bytes())
        content[place : place + len(value)] = value
        content[44:48] = struct.pack("<I", lookup3(bytes(content[:44])))
        path.write_bytes(content)

    maker.__name__ = f"superblock_{label}"
    kind(message)(maker)


BAD = "is damaged|not a run file|is cut off|left open|cannot open it"
with_superblock("of_version_9", 8, b"\x09", BAD)
with_superblock("with_addresses_of_2_bytes", 9, b"\x02", BAD)
with_superblock("left_open_by_a_writer", 11, b"\x01", "was left open by another program")
with_superblock("with_unknown_flags", 11, b"\xff", "was left open by another program")
with_superblock("with_a_base_address", 12, struct.pack("<Q", 4096), BAD)
with_superblock("with_an_extension", 20, struct.pack("<Q", 48), BAD)
with_superblock("that_ends_far_away", 28, struct.pack("<Q", 2**63), "is cut off")
with_superblock("that_ends_too_early", 28, struct.pack("<Q", 60), BAD)
with_superblock("whose_root_is_itself", 36, struct.pack("<Q", 0), BAD)
with_superblock("whose_root_is_nowhere", 36, struct.pack("<Q", 2**62), BAD)


@kind("not a run file of keelscope, or its first bytes are damaged")
def superblock_with_a_wrong_checksum(path):
    content = bytearray(path.read_bytes())
    content[45] ^= 1
    path.write_bytes(content)


@kind(BAD)
def object_header_with_a_flipped_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(b"OHDR") + 30] ^= 4
    path.write_bytes(content)


@kind(None)
def writer_died_and_the_end_is_far_away(path):
    content = bytearray(path.read_bytes())
    head = bytearray(repaired(bytes(content[:48]), len(content) + 2**20))
    head[11] = 5
    head[44:48] = struct.pack("<I", lookup3(bytes(head[:44])))
    path.write_bytes(head + content[48:])


@kind("is damaged|is cut off|missing|not a run file")
def zeros_from_the_middle_on(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 8] + bytes(len(content) - len(content) // 8))


@kind("is damaged|not a run file|missing|cannot open it")
def every_object_header_is_the_first(path):
    content = bytearray(path.read_bytes())
    first = content.index(b"OHDR")
    for found in list(re.finditer(b"OHDR", content))[1:]:
        content[found.start() : found.start() + 200] = content[first : first + 200]
    path.write_bytes(content)


# Things that are no files, and files of others


def with_content(label: str, content: bytes, message: str) -> None:
    def maker(path):
        path.write_bytes(content)

    maker.__name__ = label
    kind(message)(maker)


with_content("table_of_text", b"step,loss\n0,1.0\n", "is not an HDF5 file")
with_content("a_pickle", pickle.dumps({"a": 1}), "is not an HDF5 file")
with_content("a_zip", b"PK\x03\x04" + bytes(100), "is not an HDF5 file")
with_content("only_a_signature", b"\x89HDF\r\n\x1a\n", "is HDF5, but not a run file")
with_content("a_user_block", bytes(512) + b"\x89HDF\r\n\x1a\n" + bytes(1000), "is not an HDF5 file")
with_content("html", b"<script>alert(1)</script>", "is not an HDF5 file")


@kind("is HDF5, but not a run file|keelscope did not write it")
def hdf5_of_somebody_else(path):
    with h5py.File(path, "w") as file:
        file["weights"] = np.ones(5)


@kind("keelscope did not write it")
def hdf5_of_somebody_else_in_our_format(path):
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        file["weights"] = np.ones(5)


@kind("is a folder")
def a_folder(path):
    path.unlink()
    path.mkdir()


@kind("is not a regular file")
def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


@kind("is a symbolic link")
def a_link_to_a_secret(path):
    path.unlink()
    path.symlink_to(SECRET)


@kind("is a symbolic link|no run file")
def a_link_to_itself(path):
    path.unlink()
    path.symlink_to(path)


@kind("is a symbolic link")
def a_link_to_a_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


@kind("cannot be read")
def a_socket(path):
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(path.parent, os.O_RDONLY)  # the name of a socket has 108 bytes at most
        try:
            server.bind(f"/proc/self/fd/{here}/{path.name}")
        finally:
            os.close(here)


# What sealed files have beside the run


@changing("/sessions is a link to somewhere else")
def sessions_from_elsewhere(file):
    del file["sessions"]
    file["sessions"] = h5py.ExternalLink("/srv/other.h5", "/sessions")


@changing("/sessions/rows keeps its data outside the file")
def sessions_in_external_storage(file):
    replace(file, "sessions/rows", shape=(1,), dtype="i8", external=[(SECRET, 0, 8)])


@changing("declares|has .* entries")
def a_trillion_sessions(file):
    replace(file, "sessions/rows", shape=(2**40,), dtype="i8", chunks=(64,))


@changing("do not fit each other")
def sessions_that_do_not_fit(file):
    replace(file, "sessions/rows", data=np.zeros(7, "i8"))


# Parts beside a run, by what one of them is

PARTS: dict[str, Maker] = {
    "a_pipe": a_pipe,
    "a_link_to_a_device": a_link_to_a_device,
    "a_link_to_a_secret": a_link_to_a_secret,
    "a_folder": a_folder,
    "html": KINDS["html"][0],
    "external_storage": external_storage,
    "compression_bomb_in_steps": compression_bomb_in_steps,
    "a_heap_without_end": a_heap_without_end,
}
