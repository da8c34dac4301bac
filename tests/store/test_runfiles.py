"""All files of a run are opened as one, whatever state each of them is in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from keelscope.errors import NotARunFileError, RunNotFoundError, UsageError
from keelscope.store.lock import WriterLock
from keelscope.store.parts import part_path
from keelscope.store.reader import open_run
from keelscope.store.runfiles import RunFiles
from keelscope.store.schema import PartInfo
from keelscope.store.writer import RunWriter


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keel.h5"


@pytest.fixture
def write(path, make_layout, make_row, write_part):
    """Writes a part with the given steps."""

    def make(steps, rank=0, part=0, *, world=1, session="a", resumed=-1, dead=False, sites=6):
        info = PartInfo(rank, world, part, session, min(steps, default=0), resumed)
        layout = replace(make_layout(sites), part=info)
        rows = [make_row(layout, step) for step in steps]
        return write_part(part_path(path, rank, part), layout, rows, dead=dead)

    return make


@pytest.mark.parametrize("dead", [False, True])
def test_parts_are_read_one_after_the_other(path, write, make_layout, make_row, dead):
    write(range(20))
    write(range(20, 30), part=1, dead=dead)
    with open_run(path) as run:
        assert (run.live, run.stopped) == (False, dead)
        assert run.steps.tolist() == list(range(30))
        assert run.notes == ()
        for step in (0, 19, 20, 29):
            values = make_row(make_layout(), step).values["gradients"]["quantiles"]
            assert run["gradients/quantiles"].at(step).tolist() == values.tolist()
        assert run.read("gradients/norm", 18, 22, sites=slice(2, 4)).values.shape == (4, 2)
        assert run.observed("gradients/norm").all()


def test_parts_that_hold_the_same_modules_share_one_axis(path, write):
    for part in range(3):
        write(range(2 * part, 2 * part + 2), part=part, sites=["a", "b"])
    write(range(6, 8), part=3, sites=["a", "c"])
    files = RunFiles(path)
    axes = [next(g.sites for g in source.layout.groups if g.name == "gradients") for source in files.sources]
    assert axes[0] is axes[1] is axes[2]
    assert [site.path for site in axes[3]] == ["a", "c"]
    with open_run(path) as run:
        assert run["gradients/norm"].paths == ("a", "b", "c")


def test_a_part_with_more_sites_widens_the_axis(path, write):
    write(range(4), sites=["a", "b"])
    write(range(4, 6), part=1, sites=["b", "c"])
    with open_run(path) as run:
        assert run["gradients/norm"].paths == ("a", "b", "c")
        assert run.observed("gradients").tolist() == [[True, True, False]] * 4 + [[False, True, True]] * 2
        assert np.isnan(run["gradients/norm"].values[5, 0])
        assert run.read("gradients/norm", sites=slice(0, 1)).values[:, 0].tolist()[:2] == [0.0, 1000.0]


def test_a_resumed_session_overtakes_and_says_so(path, write):
    write(range(20), dead=True)
    write(range(15, 25), part=1, session="b", resumed=15)
    with open_run(path) as run:
        assert run.steps.tolist() == list(range(25))
        assert [(s.rows, s.rows_cut, s.resumed_at_step) for s in run.history.sessions] == [(15, 5, -1), (10, 0, 15)]
        assert run.notes == ("5 rows of earlier sessions were recorded again by a later one and left out.",)
        assert "5 rows of earlier" in repr(run)


def test_a_missing_rank_is_said(path, write):
    write(range(10), world=2)
    write(range(6), rank=1, world=2, dead=True)
    with open_run(path) as run:
        assert run.steps.size == 10
        assert run.notes == ("Rank 1 recorded nothing on 4 steps (6 to 9): sums over ranks are unknown there.",)


@pytest.mark.parametrize("damage", [b"", b"no file of ours", None])
@pytest.mark.parametrize("part", [0, 1])
def test_a_damaged_part_is_left_out_and_said(path, write, damage, part):
    write(range(10))
    write(range(10, 20), part=1)
    bad = part_path(path, 0, part)
    bad.write_bytes(bad.read_bytes()[:3000] if damage is None else damage)
    with open_run(path) as run:
        assert run.steps.tolist() == (list(range(10)) if part else list(range(10, 20)))
        assert len(run.notes) == 1
        assert bad.name in run.notes[0]
    with pytest.raises(NotARunFileError):
        RunFiles(path, strict=True)


def test_a_run_of_damaged_files_only_is_refused(path, write):
    write(range(10)).write_bytes(b"x")
    write(range(10, 20), part=1).write_bytes(b"x")
    with pytest.raises(NotARunFileError, match=r"keel\.h5 is not an HDF5 file"):
        open_run(path)
    with pytest.raises(RunNotFoundError):
        open_run(path.with_name("other.h5"))


def test_rows_of_a_damaged_chunk_are_left_out_and_said(path, write, monkeypatch):
    from keelscope.store import filesource

    write(range(10))
    write(range(10, 20), part=1)
    run = open_run(path)
    original = filesource.FileSource.read

    def broken(self, *arguments):
        if "p0001" in self.path.name:
            raise NotARunFileError("r00000.p0001.h5 is damaged: gradients/norm cannot be read.")
        return original(self, *arguments)

    monkeypatch.setattr(filesource.FileSource, "read", broken)
    values = run["gradients/norm"].values
    assert np.isnan(values[10:]).all()
    assert np.isfinite(values[:10]).all()
    part = path.parent / f"{path.name}.parts" / "r00000.p0001.h5"
    said = f"{part} is damaged: gradients/norm on steps 10 to 19 cannot be read, and is left out."
    assert run.notes == (said,)
    assert run.observed("gradients/norm")[:10].all()
    assert not run.observed("gradients/norm")[10:].any()
    run.close()


def test_refresh_finds_rows_and_parts(path, layout, make_row, write):
    writer = RunWriter(path, layout)
    for step in range(5):
        writer.append(make_row(layout, step))
    run = writer.run()
    assert (run.live, run.steps.size, run.refresh()) == (True, 5, False)
    writer.append(make_row(layout, 5))
    writer.flush()
    assert run.refresh()
    assert run.history.generation == 0
    writer.close()
    assert run.refresh() is False
    assert not run.live
    write(range(6, 9), part=1)
    assert run.refresh()
    assert run.steps.tolist() == list(range(9))
    assert run.history.generation == 0
    write(range(4, 6), part=2, session="b", resumed=4)
    assert run.refresh()
    assert run.steps.tolist() == list(range(6))
    assert run.history.generation == 1
    run.close()


def test_a_rank_that_holds_its_lock_is_live_and_waited_for(path, write):
    write(range(10), world=2)
    lock = WriterLock(path, 1)
    write(range(4), rank=1, world=2, dead=True)
    with open_run(path) as run:
        assert run.live
        assert run.steps.tolist() == list(range(4))
        lock.release()
        assert run.refresh()
        assert (run.live, run.stopped, run.steps.size) == (False, True, 10)


def test_an_earlier_part_is_not_live_when_the_lock_is_held_again(path, write):
    write(range(10), dead=True)
    write(range(10, 12), part=1, session="b", resumed=10, dead=True)
    lock = WriterLock(path, first_part=1)
    with open_run(path) as run:
        assert [source.live for source in run._source.sources] == [False, True]
        assert run.steps.size == 12
    lock.release()


def test_nothing_can_be_read_after_close(path, write):
    write(range(10))
    write(range(10, 20), part=1)
    run = open_run(path)
    run.close()
    with pytest.raises(UsageError, match="was closed; open it again"):
        run["gradients/norm"]
    assert not run.refresh()
