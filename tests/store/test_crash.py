"""Writers are killed for real, at random moments from creation to close; every committed row must still be there."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import h5py
import numpy as np
import pytest

from keelscope.store.opening import FileState, file_state
from keelscope.store.parts import find_parts
from keelscope.store.reader import open_run
from keelscope.store.writer import RunWriter

ROWS = 40

# One interpreter forks the writers, so that a trial costs milliseconds and a kill can hit every phase: creation, rows,
# the change from one part to the next, a session that goes on with a killed one, and close. What a writer knows to be
# committed it logs; the scalar ``loss`` of every row says which session wrote it.
KILLS = """
import json, os, pathlib, random, signal, sys, time
from dataclasses import replace
from conftest import make_row, make_small_layout
from keelscope.store.pace import Pace
from keelscope.store.schema import PartInfo
from keelscope.store.writer import RunWriter

folder, trials, seed, rows = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
chance = random.Random(seed)
layout = make_small_layout()
made = [make_row(layout, step) for step in range(rows)]

def write(place, session, first, end, pause, part_rows):
    log = os.open(place / f"log{session}", os.O_WRONLY | os.O_CREAT)
    say = lambda what: os.write(log, f"{what}\\n".encode())
    pace = Pace(part_rows=part_rows)
    writer = RunWriter(place / "keel.h5", layout, exists="resume", pace=pace, part=PartInfo(first_step=first))
    say(first)
    for number, row in enumerate(made[first:end], first + 1):
        writer.append(replace(row, scalars={"loss": session}))
        if number % pause == 0:
            writer.flush()
            say(number)
    say("closing")
    writer.close()
    say(end)
    time.sleep(60)

def kill_one(place, session, first):
    end, pause, part_rows = chance.randint(first + 1, rows), chance.randint(1, 15), chance.choice([7, 15, 1000])
    child = os.fork()
    if child == 0:
        try:
            write(place, session, first, end, pause, part_rows)
        finally:
            os._exit(1)
    moment, log = chance.choice(["creation", "rows", "closing", "closing"]), place / f"log{session}"
    seen = {"creation": "", "rows": "\\n", "closing": "closing"}[moment]
    while not log.exists() or seen not in log.read_text():
        time.sleep(0.0005)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the writer failed"
    time.sleep(chance.uniform(0.0, {"creation": 0.02, "rows": 0.05, "closing": 0.1}[moment]))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = [int(word) for word in log.read_text().split() if word != "closing"]
    return {"session": session, "first": first, "committed": said[-1] if said else first, "moment": f"during {moment}"}

for trial in range(trials):
    place = folder / f"{trial:04}"
    place.mkdir()
    done, first = [], 0
    for session in range(chance.choice([1, 1, 2])):
        done.append(kill_one(place, session, first))
        first = min(chance.randint(done[-1]["first"], done[-1]["committed"]), rows - 1)
    (place / "sessions.json").write_text(json.dumps(done))
"""


@pytest.fixture
def folder():
    """In memory where possible: a kill leaves what the system was told, and waiting for a disk is slow."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        yield Path(name)


def test_no_committed_row_is_lost_in_two_hundred_kills(folder, python, make_small_layout, make_row):
    found = kill_and_check(folder, python, make_small_layout, make_row, kills=200)
    assert found[FileState.DEAD]
    assert found[FileState.CLOSED]


@pytest.mark.slow
def test_no_committed_row_is_lost_in_a_thousand_kills(folder, python, make_small_layout, make_row):
    found = kill_and_check(folder, python, make_small_layout, make_row, kills=1000)
    sys.stdout.write(f"\n{dict(found)}\n")


def kill_and_check(folder, python, make_small_layout, make_row, kills):
    layout = make_small_layout()
    made = [make_row(layout, step) for step in range(ROWS)]
    found = Counter()
    for seed in range(kills // 100):
        (folder / f"{seed}").mkdir()
        python(KILLS, folder / f"{seed}", 75, seed, ROWS)
        for place in sorted((folder / f"{seed}").iterdir()):
            found += check(place, made)
    assert found["kills"] >= 0.9 * kills
    return found


def check(place, made):
    """What is left of one run: every committed row, exactly, of the session that wrote it last."""
    sessions = json.loads((place / "sessions.json").read_text())
    counts = Counter(session["moment"] for session in sessions) + Counter(kills=len(sessions))
    path = place / "keel.h5"
    if not path.exists():
        assert all(session["committed"] == session["first"] for session in sessions)
        return counts + Counter(["no file yet"])
    files = [path, *find_parts(path).values()]
    before = {file: file.read_bytes() for file in files}
    counts += Counter(map(file_state, files)) + Counter(parts=len(files))
    with open_run(path) as run:
        assert not run.live
        rows = len(run.steps)
        assert run.steps.tolist() == list(range(rows))
        assert rows >= sessions[-1]["committed"]
        writers = run["scalars/loss"].values
        assert np.isin(writers, [session["session"] for session in sessions]).all()
        if len(sessions) > 1:
            assert (writers[: sessions[1]["first"]] == 0).all()
            assert (writers[sessions[1]["first"] : sessions[1]["committed"]] == 1).all()
        for group in run.groups.values():
            recorded = [row.values[group.name] for row in made[:rows] if group.name in row.values]
            for name in (spec.name for spec in group.statistics):
                values = run[f"{group.name}/{name}"].values
                assert np.array_equal(values, np.array([row[name] for row in recorded]).reshape(values.shape))
            assert run.observed(group.name).all()
        assert not run.refresh()
    for file, data in before.items():
        assert file.read_bytes() == data
        with h5py.File(file, "r", swmr=True, locking=False) as plain:
            assert len(plain["gradients/step"]) <= len(plain["gradients/norm"])
    return counts + Counter(rows=rows)


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
