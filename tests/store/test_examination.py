from __future__ import annotations

from dataclasses import replace

import pytest

from keelscope.errors import RunNotFoundError
from keelscope.store.examination import examined, repaired
from keelscope.store.lock import WriterLock, parts_folder
from keelscope.store.parts import find_parts, part_path
from keelscope.store.reader import open_run
from keelscope.store.schema import PartInfo
from keelscope.store.sealing import seal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keel.h5"


@pytest.fixture
def write(path, make_layout, make_row, write_part):
    def make(steps, rank=0, part=0, *, world=1, session="a", resumed=-1, dead=False):
        info = PartInfo(rank, world, part, session, min(steps, default=0), resumed)
        layout = replace(make_layout(), part=info)
        return write_part(part_path(path, rank, part), layout, [make_row(layout, step) for step in steps], dead=dead)

    return make


def test_a_dead_run_of_two_sessions_is_described_and_repaired(path, write):
    write(range(20), dead=True)
    write(range(15, 25), part=1, session="b", resumed=15, dead=True)
    (parts_folder(path) / "seal.tmp-99").write_bytes(b"half")
    (parts_folder(path) / "r00000.lock").touch()
    (parts_folder(path) / "r00000.json").write_text('{"pid": 999999999, "started": 1}')
    found = examined(path)
    assert (found.state, found.rows, found.first_step, found.last_step) == ("stopped", 25, 0, 24)
    assert [(f.state, f.rows, f.session, f.damaged) for f in found.files] == [
        ("dead", 20, "a", ()),
        ("dead", 10, "b", ()),
    ]
    assert found.history.rows_cut == 5
    assert found.strays == ("seal.tmp-99", "r00000.lock", "r00000.json")
    assert found.is_sound
    done = repaired(path)
    assert done[0].startswith("Sealed into one file")
    assert not parts_folder(path).exists()
    after = examined(path)
    assert (after.state, after.rows, after.strays, len(after.files)) == ("sealed", 25, (), 1)
    assert repaired(path) == ["Not sealed: already sealed."]


def test_looking_changes_nothing(path, write):
    write(range(20), dead=True)
    before = path.read_bytes()
    assert examined(path) == examined(path)
    assert path.read_bytes() == before


def test_damaged_files_and_datasets_are_named_and_kept(path, write):
    write(range(30))
    write(range(30, 40), part=1).write_bytes(b"nothing")
    seal_would_lose = find_parts(path)[0, 1]
    found = examined(path)
    assert not found.is_sound
    assert [f.state for f in found.files] == ["closed", "damaged"]
    assert "p0001" in found.files[1].problem
    assert repaired(path)[0].startswith("The run was not sealed")
    assert seal_would_lose.read_bytes() == b"nothing"
    assert open_run(path).steps.size == 30


def test_a_damaged_chunk_of_a_sealed_file_is_found(path, write):
    import h5py

    write(range(300))
    seal(path)
    with h5py.File(path) as file:
        place = file["gradients/rms"].id.get_chunk_info(1)
    with path.open("r+b") as raw:
        raw.seek(place.byte_offset + place.size // 2)
        raw.write(b"damage damage damage")
    found = examined(path)
    assert found.files[0].damaged == ("gradients/rms",)
    assert not found.is_sound


def test_a_run_that_is_written_is_not_touched(path, write):
    write(range(5), dead=True)
    lock = WriterLock(path)
    assert examined(path).state == "being recorded"
    assert repaired(path) == ["Nothing was changed: the run is being written."]
    lock.release()


def test_leftovers_of_a_killed_sealing_are_removed(path, write):
    write(range(10))
    second = write(range(10, 20), part=1)
    kept = second.read_bytes()
    seal(path)
    second.parent.mkdir()
    second.write_bytes(kept)
    assert [f.merged for f in examined(path).files] == [False, True]
    assert repaired(path) == ["Not sealed: already sealed.", "Removed r00000.p0001.h5, which held nothing of its own."]
    assert examined(path).rows == 20


def test_no_run_is_an_error(path):
    with pytest.raises(RunNotFoundError, match="there is no run file"):
        examined(path)
