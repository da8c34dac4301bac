from __future__ import annotations

import h5py
import pytest

from keelscope.store.superblock import CLOSED, SIZE, WRITING, WRITING_SWMR, lookup3, parse, repaired


@pytest.fixture
def head(tmp_path):
    def make(*, swmr: bool, closed: bool) -> bytes:
        path = tmp_path / f"{swmr}{closed}.h5"
        file = h5py.File(path, "w", libver=("v110", "v110"), locking=False)
        file["x"] = [1.0]
        file.flush()
        if swmr:
            file.swmr_mode = True
        file.flush()
        if closed:
            file.close()
        start = path.read_bytes()[:SIZE]
        file.close()
        return start

    return make


# hashlittle("", 0), and "Four score and seven years ago" with initial value 0, as printed by the author's own driver5.
@pytest.mark.parametrize(("data", "hashed"), [(b"", 0xDEADBEEF), (b"Four score and seven years ago", 0x17770551)])
def test_checksum_agrees_with_the_published_values(data, hashed):
    assert lookup3(data) == hashed


@pytest.mark.parametrize(
    ("swmr", "closed", "flags"), [(True, False, WRITING_SWMR), (False, False, WRITING), (True, True, CLOSED)]
)
def test_flags_and_checksum_of_files_made_by_hdf5(head, swmr, closed, flags):
    block = parse(head(swmr=swmr, closed=closed))
    assert block is not None
    assert (block.version, block.flags, block.sound) == (3, flags, True)


def test_end_of_file_of_a_closed_file_is_its_size(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w", libver=("v110", "v110")) as file:
        file["x"] = range(1000)
    data = (tmp_path / "x.h5").read_bytes()
    assert parse(data[:SIZE]).end_of_file == len(data)


def test_a_repaired_superblock_is_sound_closed_and_ends_where_told(head):
    fixed = parse(repaired(head(swmr=True, closed=False), 5000))
    assert (fixed.flags, fixed.end_of_file, fixed.sound) == (CLOSED, 5000, True)


def test_one_wrong_bit_is_noticed(head):
    data = bytearray(head(swmr=False, closed=True))
    data[30] ^= 4
    assert not parse(bytes(data)).sound


@pytest.mark.parametrize("data", [b"", b"\x89HDF\r\n\x1a\n", b"x" * 100, b"\x89HDF\r\n\x1a\n\x00" + b"\0" * 90])
def test_other_bytes_are_no_superblock(data):
    assert parse(data) is None
