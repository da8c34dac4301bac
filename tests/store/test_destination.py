"""Which name a rank gets, and that the ranks of one launch get the same one without talking to each other."""

from __future__ import annotations

from dataclasses import replace

import h5py
import pytest

from keelscope.errors import RunExistsError
from keelscope.store.destination import claims
from keelscope.store.lock import WriterLock
from keelscope.store.parts import find_parts, part_path
from keelscope.store.schema import PartInfo
from keelscope.store.writer import RunWriter

RANKS = """
import os, pathlib, random, sys, time
from conftest import make_layout, make_row
from keelscope.store.pace import Pace
from keelscope.store.schema import PartInfo
from keelscope.store.writer import RunWriter

folder, launches, ranks = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
layout, chance = make_layout(), random.Random(5)
for launch in range(launches):
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            os.environ["TORCHELASTIC_RUN_ID"] = f"launch {launch}"
            time.sleep(random.Random(100 * launch + rank).choice([0.0, 0.0, 0.02]))
            writer = RunWriter(folder / "keel.h5", layout, part=PartInfo(rank, ranks), pace=Pace(seal="never"))
            for step in range(3):
                writer.append(make_row(layout, step))
            time.sleep(0.3)
            writer.close()
            os._exit(0)
        children.append(pid)
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in children)
"""


def test_ranks_of_one_launch_meet_under_a_free_name(tmp_path, python):
    (tmp_path / "keel.h5").write_text("precious")
    python(RANKS, tmp_path, 4, 4)
    for number in range(2, 6):
        run = tmp_path / f"keel-{number}.h5"
        files = [run, *find_parts(run).values()]
        assert list(find_parts(run)) == [(1, 0), (2, 0), (3, 0)]
        sessions, worlds = set(), set()
        for rank, file in enumerate(files):
            with h5py.File(file) as part:
                assert part["scalars/step"][:].tolist() == [0, 1, 2]
                assert (part.attrs["rank"], part.attrs["resumed_at_step"]) == (rank, -1)
                assert part.attrs["keelscope_kind"] == ("part" if rank else "run")
                sessions.add(part.attrs["session_id"])
                worlds.add(int(part.attrs["world_size"]))
        assert len(sessions) == 1
        assert worlds == {4}
    assert (tmp_path / "keel.h5").read_text() == "precious"
    assert not (tmp_path / "keel-6.h5").exists()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_ranks_meet_in_whatever_order_they_come(tmp_path, layout, order):
    part = PartInfo(world_size=3, session_id="s")
    writers = [RunWriter(tmp_path / "keel.h5", layout, part=replace(part, rank=rank)) for rank in order]
    assert {writer.path.name for writer in writers} == {"keel.h5"}
    for writer in writers:
        writer.close()
    assert list(find_parts(tmp_path / "keel.h5")) == [(1, 0), (2, 0)]


def test_files_of_another_launch_are_passed_over(tmp_path, layout):
    """Also those of ranks whose rank 0 never came."""
    old = RunWriter(tmp_path / "keel.h5", layout, part=PartInfo(1, 2, session_id="old"))
    new = [RunWriter(tmp_path / "keel.h5", layout, part=PartInfo(rank, 2, session_id="new")) for rank in (0, 1)]
    old.close()
    later = RunWriter(tmp_path / "keel.h5", layout, part=PartInfo(0, 2, session_id="old"))
    assert [writer.path.name for writer in (old, *new, later)] == ["keel.h5", "keel-2.h5", "keel-2.h5", "keel-3.h5"]
    for writer in (*new, later):
        writer.close()


def test_a_rank_that_waits_for_no_one_names_its_own_file(tmp_path, layout, make_row):
    """A launcher that shares nothing costs the meeting, never the rows."""
    writers = [RunWriter(tmp_path / "keel.h5", layout, part=PartInfo(r, 2, session_id=f"s{r}")) for r in (0, 1)]
    for writer in writers:
        writer.append(make_row(layout, 0))
        writer.close()
    assert [writer.path.name for writer in writers] == ["keel.h5", "keel-2.h5"]
    with h5py.File(part_path(tmp_path / "keel-2.h5", 1, 0)) as part:
        assert part["scalars/step"][:].tolist() == [0]


def test_a_claim_that_is_passed_over_leaves_nothing_behind(tmp_path):
    offered = claims(tmp_path / "keel.h5", PartInfo(), "new")
    first = next(offered)
    (tmp_path / "keel.h5").touch()
    first.lock.release()
    assert next(offered).path.name == "keel-2.h5"
    assert not (tmp_path / "keel.h5.parts").exists()


def test_going_on_with_a_run_takes_the_next_part_of_that_rank(tmp_path, layout):
    for rank in (0, 1):
        RunWriter(tmp_path / "keel.h5", layout, part=PartInfo(rank, 2, session_id="a"), exists="resume").close()
    found = []
    for rank, world in ((0, 3), (1, 3), (2, 3), (0, 1)):
        part = PartInfo(rank, world, first_step=40)
        claim = next(claims(tmp_path / "keel.h5", part, "resume"))
        found.append((claim.part.part, claim.part.resumed_at_step))
        claim.lock.release()
    assert found == [(1, 40), (1, 40), (0, 40), (1, 40)]


def test_the_first_session_resumes_nothing_whoever_comes_first(tmp_path, layout):
    writers = [
        RunWriter(tmp_path / "keel.h5", layout, part=PartInfo(r, 3, session_id="a", first_step=7), exists="resume")
        for r in (1, 0, 2)
    ]
    for writer in writers:
        writer.close()
    for file in (tmp_path / "keel.h5", *find_parts(tmp_path / "keel.h5").values()):
        with h5py.File(file) as part:
            assert (part.attrs["resumed_at_step"], part.attrs["first_step"]) == (-1, 7)


def test_a_run_that_is_being_written_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("keelscope.store.destination._PATIENCE", 0.05)
    lock = WriterLock(tmp_path / "keel.h5")
    with pytest.raises(RunExistsError, match="still being written"):
        next(claims(tmp_path / "keel.h5", PartInfo(), "resume"))
    lock.release()
