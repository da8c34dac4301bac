"""Writers are killed for real, at random moments from creation to close; every committed row must still be there."""

from __future__ import annotations

import h5py
import pytest

from keelscope.store.opening import FileState, file_state
from keelscope.store.reader import open_run
from keelscope.store.writer import RunWriter

# One interpreter forks the writers, so that a trial costs milliseconds and a kill can hit every phase.
KILLS = """
import os, pathlib, random, signal, sys, time
from conftest import make_layout, make_row
from keelscope.store.writer import RunWriter

folder, trials, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
layout = make_layout(40)
made = [make_row(layout, step) for step in range(600)]

def write(place, end, pause):
    log = os.open(place / "log", os.O_WRONLY | os.O_CREAT)
    writer = RunWriter(place / "keel.h5", layout)
    os.write(log, b"0\\n")
    for number, row in enumerate(made[:end], 1):
        writer.append(row)
        if number % pause == 0:
            writer.flush()
            os.write(log, f"{number}\\n".encode())
    writer.close()
    os.write(log, f"{end}\\n".encode())
    time.sleep(60)

for trial in range(trials):
    place = folder / f"{trial:03}"
    place.mkdir()
    end, pause, wait = chance.choice([20, 100, 600]), chance.randint(1, 40), chance.uniform(0.0, 0.15)
    child = os.fork()
    if child == 0:
        write(place, end, pause)
    while trial % 3 and not ((place / "log").exists() and (place / "log").stat().st_size):
        time.sleep(0.001)
    time.sleep(wait)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_no_committed_row_is_lost_when_the_writer_is_killed(tmp_path, python, make_layout, make_row):
    states = kill_and_check(tmp_path, python, make_layout, make_row, trials=25)
    assert FileState.DEAD in states


@pytest.mark.slow
def test_no_committed_row_is_lost_in_three_hundred_kills(tmp_path, python, make_layout, make_row):
    states = kill_and_check(tmp_path, python, make_layout, make_row, trials=300)
    assert {FileState.DEAD, FileState.CLOSED} <= set(states)


def kill_and_check(folder, python, make_layout, make_row, trials):
    python(KILLS, folder, trials, trials)
    layout = make_layout(40)
    expected = [make_row(layout, step) for step in range(600)]
    return [check(place, expected) for place in sorted(folder.iterdir())]


def check(place, expected):
    """What is left of one killed writer: every committed row, exactly, by every way of opening the file."""
    log = place / "log"
    committed = int(log.read_text().split()[-1]) if log.exists() and log.read_text() else 0
    path = place / "keel.h5"
    if not path.exists():
        assert committed == 0
        return None
    before = path.read_bytes()
    with h5py.File(path, "r", swmr=True, locking=False) as file:
        found = file["gradients/step"][:]
        assert len(found[found >= 0]) >= committed
    with open_run(path) as run:
        assert not run.live
        rows = len(run.steps)
        assert rows >= committed
        assert run.steps.tolist() == list(range(rows))
        for group in run.groups.values():
            recorded = [row.values[group.name] for row in expected[:rows] if group.name in row.values]
            for name in (spec.name for spec in group.statistics):
                values = run[f"{group.name}/{name}"].values
                assert values.tolist() == [row[name].tolist() for row in recorded]
            assert run.observed(group.name).all()
        assert run["scalars/loss"].values.tolist() == [row.scalars["loss"] for row in expected[:rows]]
        assert not run.refresh()
    assert path.read_bytes() == before
    return file_state(path)


def test_a_writer_that_kills_itself_after_a_flush_leaves_a_readable_run(tmp_path, python, make_layout):
    script = """
import os, signal, sys
from conftest import make_layout, make_row
from keelscope.store.writer import RunWriter
layout = make_layout()
writer = RunWriter(sys.argv[1], layout)
for step in range(21):
    writer.append(make_row(layout, step))
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    python(script, tmp_path / "keel.h5", check=False)
    assert file_state(tmp_path / "keel.h5") is FileState.DEAD
    with open_run(tmp_path / "keel.h5") as run:
        assert run.info == make_layout().info
        assert (run.live, run.stopped, run.steps.tolist()) == (False, True, list(range(21)))


def test_a_copy_of_a_live_run_is_read_like_a_killed_one(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    for step in range(20):
        writer.append(make_row(layout, step))
    writer.flush()
    (tmp_path / "copy.h5").write_bytes(writer.path.read_bytes())
    writer.close()
    run = open_run(tmp_path / "copy.h5")
    assert (run.live, run.steps.size) == (False, 20)
