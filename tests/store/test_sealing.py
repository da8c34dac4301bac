"""A sealed run says what its parts say, opens without them, and whatever goes wrong leaves the parts as they were."""

from __future__ import annotations

import os
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keelscope.errors import NotARunFileError, RunNotFoundError, UsageError
from keelscope.store import sealing as module
from keelscope.store.lock import WriterLock, parts_folder
from keelscope.store.parts import find_parts, part_path
from keelscope.store.reader import open_run
from keelscope.store.schema import PartInfo, Row
from keelscope.store.sealing import Outcome, seal, stray_drafts


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keel.h5"


@pytest.fixture
def write(path, make_layout, make_row, write_part):
    """Writes a part with the given steps; every rank sees other values, and statistics combine in different ways."""

    def make(steps, rank=0, part=0, *, world=1, session="a", resumed=-1, dead=False, sites=6, factor=None):
        layout = make_layout(sites)
        rules = dict(zip(("norm", "rms", "quantiles"), ("root_sum_squares", "rms", "max"), strict=True))
        groups = tuple(
            replace(g, statistics=tuple(replace(s, across_ranks=rules[s.name]) for s in g.statistics))
            for g in layout.groups
        )
        info = PartInfo(rank, world, part, session, min(steps, default=0), resumed)
        layout = replace(layout, groups=groups, part=info)
        rows = [scaled(make_row(layout, step), factor or rank + 1) for step in steps]
        return write_part(part_path(path, rank, part), layout, rows, dead=dead)

    return make


def scaled(row, factor):
    values = {g: {n: factor * v for n, v in columns.items()} for g, columns in row.values.items()}
    return Row(row.step, row.wall_time, values, row.scalars)


def everything(path):
    """All numbers of a run, as its reader gives them."""
    with open_run(path) as run:
        found = {key: (run[key].values.copy(), run[key].steps.tolist(), run[key].paths) for key in list(run.keys())}
        seen = {key: run.observed(key) for key in list(run.keys()) if not key.startswith("scalars")}
        sessions = [(s.session_id, s.rows, s.rows_cut, s.resumed_at_step, s.parts) for s in run.history.sessions]
        return found, seen, sessions, run.history.absences, run.info, run.coverage


def assert_same(before, after):
    for key, (values, steps, paths) in before[0].items():
        assert np.array_equal(values, after[0][key][0], equal_nan=True), key
        assert (steps, paths) == after[0][key][1:]
    for key, seen in before[1].items():
        assert np.array_equal(seen, after[1][key]), key
    assert before[2:] == after[2:]


def test_parts_of_several_sessions_become_one_file(path, write):
    write(range(20), dead=True)
    write(range(15, 25), part=1, session="b", resumed=15)
    write(range(25, 30), part=2, session="b", resumed=15, sites=["blocks.0", "new"])
    before = everything(path)
    done = seal(path)
    assert (done.outcome, done.bytes_after) == (Outcome.SEALED, path.stat().st_size)
    assert done.bytes_after < done.bytes_before
    assert list(path.parent.iterdir()) == [path]
    assert_same(before, everything(path))
    with h5py.File(path) as file:
        assert file.attrs["keelscope_kind"] == "run"
        assert (file.attrs["parts_merged"], file.attrs["rows_dropped_overlap"]) == (3, 5)
        assert file.attrs["sealed_at"].startswith("20")
        norm = file["gradients/norm"]
        assert (norm.compression, norm.compression_opts, norm.shuffle, norm.fletcher32) == ("gzip", 1, True, True)
        assert file["sessions/rows_cut"][:].tolist() == [5, 0]
        assert file["status"][0] == 2
    assert seal(path).outcome is Outcome.ALREADY


def test_ranks_become_one_file_that_still_knows_them_apart(path, write):
    write(range(10), world=2)
    write(range(6), rank=1, world=2, dead=True)
    before = everything(path)
    seal(path)
    assert_same(before, everything(path))
    with h5py.File(path) as file:
        assert file["ranks/present"][:].tolist() == [[1] * 10, [1] * 6 + [0] * 4]
        norm, own = file["gradients/norm"][:], file["by_rank/gradients/norm"][:]
        assert own.shape == (2, 10, 6)
        assert np.allclose(np.hypot(own[0, :6], own[1, :6]), norm[:6], rtol=1e-15)
        assert np.isnan(own[1, 6:]).all()
        assert np.isnan(norm[6:]).all()
        assert file["by_rank/gradients/observed"][:, 7, 0].tolist() == [1, 0]
    with open_run(path) as run:
        assert run.observed("gradients").all()
        assert not run.observed("gradients/norm")[6:].any()
        assert run.observed("gradients/rms").all()


def test_a_sealed_run_goes_on_and_is_sealed_again(path, write):
    write(range(10), world=2)
    write(range(8), rank=1, world=2)
    seal(path)
    write(range(8, 14), part=1, world=3, session="b", resumed=8)
    write(range(8, 14), rank=1, world=3, session="b", resumed=8)
    write(range(8, 12), rank=2, world=3, session="b", resumed=8)
    before = everything(path)
    assert before[0]["gradients/norm"][1] == list(range(14))
    seal(path)
    after = everything(path)
    assert_same((*before[:2], [], *before[3:]), (*after[:2], [], *after[3:]))
    assert [(s[1], s[2]) for s in after[2]] == [(8, 2), (6, 0)]
    with h5py.File(path) as file:
        assert file["ranks/present"][:, [0, 7, 8, 13]].tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [2, 2, 1, 0]]
        own = file["by_rank/gradients/norm"][:]
        assert np.array_equal(own[1, :8], 2 * own[0, :8])
        assert np.isnan(own[2, :8]).all()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_sealing_changes_no_number(tmp_path_factory, make_layout, make_row, write_part, data):
    path = tmp_path_factory.mktemp("run") / "keel.h5"
    step, number = 0, 0
    for session in range(data.draw(st.integers(1, 2))):
        step = max(0, step - data.draw(st.integers(0, 3))) if session else 0
        for _ in range(data.draw(st.integers(1, 2))):
            count = data.draw(st.integers(0 if number else 1, 5))
            sites = data.draw(st.permutations(["a", "b", "c"]))[: data.draw(st.integers(1, 3))]
            info = PartInfo(0, 1, number, f"s{session}", step, step if session else -1)
            layout = replace(make_layout(sites), part=info)
            rows = [make_row(layout, step + index) for index in range(count)]
            write_part(part_path(path, 0, number), layout, rows, dead=data.draw(st.booleans()))
            step, number = step + count, number + 1
    before = everything(path)
    assert seal(path).outcome is Outcome.SEALED
    assert_same(before, everything(path))


@pytest.mark.parametrize(("precision", "error"), [("float32", 2.0**-24), ("10bit", 2.0**-11)])
def test_rounding_is_asked_for_and_said(path, write, precision, error):
    write(range(50), factor=np.pi)
    before = everything(path)[0]
    seal(path, precision)
    after = everything(path)[0]
    for key, (values, _, _) in before.items():
        bound = 0.0 if key.startswith("scalars") else error
        assert (np.abs(after[key][0] - values) <= bound * np.abs(values)).all(), key
    with h5py.File(path) as file:
        assert file.attrs["quantization"] == precision
        assert "bits of mantissa" in file["gradients/norm"].attrs["quantization"]
    with pytest.raises(UsageError, match="'exact', 'float32', '10bit'"):
        seal(path, "11bit")


def test_what_float32_holds_is_stored_as_float32_and_the_rest_is_not(path, make_layout, make_row, write_part):
    layout = make_layout()
    rows = []
    for step in range(20):
        row = make_row(layout, step)
        values = {**row.values["gradients"], "norm": np.float64(np.float32(row.values["gradients"]["norm"]))}
        rows.append(replace(row, values={"gradients": values | {"rms": np.full(6, 1e-60)}}))
    write_part(path, layout, rows)
    before = everything(path)
    seal(path)
    assert_same(before, everything(path))
    with h5py.File(path) as file:
        assert [file[f"gradients/{n}"].dtype.itemsize for n in ("norm", "rms", "quantiles")] == [4, 8, 8]


def test_a_rank_that_has_not_come_yet_is_waited_for_and_one_that_comes_late_takes_nothing_away(path, write):
    write(range(10), world=2)
    assert seal(path).outcome is Outcome.INCOMPLETE
    assert seal(path, incomplete=True).outcome is Outcome.SEALED
    before = everything(path)
    late = write(range(5), rank=1, world=2)
    with open_run(path) as run:
        assert run.steps.tolist() == list(range(10))
        assert "was recorded by rank 1 after its session had been sealed" in " ".join(run.notes)
    with pytest.raises(NotARunFileError, match=r"r00001\.p0000\.h5 was recorded by rank 1 after"):
        seal(path)
    assert late.exists()
    assert_same(before, everything(path))


def test_a_run_that_is_written_is_left_alone(path, write):
    write(range(5))
    lock = WriterLock(path, 3)
    before = path.read_bytes()
    assert seal(path).outcome is Outcome.BUSY
    lock.release()
    assert path.read_bytes() == before


def test_a_run_that_changes_meanwhile_is_left_alone(path, write, monkeypatch):
    write(range(5))
    original = module.check_equal

    def slow(*arguments):
        original(*arguments)
        write(range(5, 8), part=1)

    monkeypatch.setattr(module, "check_equal", slow)
    assert seal(path).outcome is Outcome.CHANGED
    with open_run(path) as run:
        assert run.steps.tolist() == list(range(8))
    assert not stray_drafts(path)


def test_nothing_is_replaced_when_the_draft_is_not_what_the_parts_are(path, write, monkeypatch):
    write(range(5))
    original = module.write_sealed

    def wrong(file, *arguments):
        original(file, *arguments)
        file["gradients/norm"][2, 3] = 7.0

    monkeypatch.setattr(module, "write_sealed", wrong)
    before = path.read_bytes()
    with pytest.raises(NotARunFileError, match="does not hold the same gradients/norm"):
        seal(path)
    assert path.read_bytes() == before
    assert not parts_folder(path).exists()


def test_a_damaged_part_keeps_a_run_from_being_sealed(path, write):
    write(range(5))
    write(range(5, 9), part=1).write_bytes(b"nothing")
    before = path.read_bytes()
    with pytest.raises(NotARunFileError, match="p0001"):
        seal(path)
    assert path.read_bytes() == before
    assert len(find_parts(path)) == 1
    with pytest.raises(RunNotFoundError):
        seal(path.with_name("none.h5"))


def test_a_full_disk_is_an_error_before_anything_is_written(path, write, monkeypatch):
    write(range(5))
    disk = os.statvfs(path.parent)
    full = os.statvfs_result((*disk[:3], 100, 100, *disk[5:10]))
    monkeypatch.setattr(module.os, "statvfs", lambda _: full)
    with pytest.raises(OSError, match="are free on its disk"):
        seal(path)
    assert list(path.parent.iterdir()) == [path]


def test_parts_that_a_killed_sealing_left_are_not_read_twice(path, write):
    write(range(10), dead=True)
    second = write(range(8, 12), part=1, session="b", resumed=8)
    kept = second.read_bytes()
    seal(path)
    before = everything(path)
    second.parent.mkdir()
    second.write_bytes(kept)
    assert_same(before, everything(path))
    assert module.remove_merged(path) == [second]


def test_an_open_reader_goes_on_with_the_sealed_file(path, write):
    write(range(10))
    write(range(10, 20), part=1)
    run = open_run(path)
    values = run["gradients/norm"].values
    seal(path)
    assert run["gradients/norm"].values.tolist() == values.tolist()
    assert not run.refresh()
    assert run.history.sealed
    assert run["gradients/norm"].values.tolist() == values.tolist()
    run.close()


def test_an_empty_run_is_sealed_too(path, write):
    write([])
    assert seal(path).outcome is Outcome.SEALED
    with open_run(path) as run:
        assert run.steps.size == 0
        assert run["gradients/norm"].values.shape == (0, 6)
