"""Processes are killed for real while they close and seal a run; every committed row must still be there, once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from keelscope.store.lock import parts_folder
from keelscope.store.opening import FileState, file_state
from keelscope.store.parts import find_parts
from keelscope.store.reader import open_run
from keelscope.store.sealing import Outcome, seal

# One interpreter forks the writers, so that a trial costs milliseconds and a kill can hit every phase.
KILLS = """
import os, pathlib, random, signal, sys, time
from conftest import make_layout, make_row
from keelscope.store import sealing
from keelscope.store.pace import Pace
from keelscope.store.writer import RunWriter

folder, trials, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
layout = make_layout(40)
made = [make_row(layout, step) for step in range(60)]

def write(place):
    log = os.open(place / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = RunWriter(place / "keel.h5", layout, pace=Pace(part_rows=25))
    for row in made:
        writer.append(row)
    writer.flush()
    os.write(log, b"60\\n")
    writer.close()
    os.write(log, b"sealed\\n")
    os._exit(0)

for trial in range(trials):
    place = folder / f"{trial:04}"
    place.mkdir()
    child = os.fork()
    if child == 0:
        write(place)
    if trial % 5:  # most kills hit sealing, some anything
        while not ((place / "log").exists() and (place / "log").stat().st_size):
            time.sleep(0.0005)
    time.sleep(chance.expovariate(1 / (0.12 if trial % 5 else 0.02)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_no_row_is_lost_when_sealing_is_killed(tmp_path, python, make_layout, make_row):
    assert kill_and_check(tmp_path, python, make_layout, make_row, trials=20)["draft"] > 0


@pytest.mark.slow
def test_no_row_is_lost_in_six_hundred_kills_of_sealing(tmp_path, python, make_layout, make_row):
    found = kill_and_check(tmp_path, python, make_layout, make_row, trials=600)
    assert min(found["draft"], found["sealed"], found["parts"]) > 10, found


def kill_and_check(folder, python, make_layout, make_row, trials):
    python(KILLS, folder, trials, trials, timeout=3000)
    layout = make_layout(40)
    expected = [make_row(layout, step) for step in range(60)]
    found = {"draft": 0, "sealed": 0, "parts": 0, "rows": 0}
    for place in sorted(folder.iterdir()):
        check(place, expected, found)
    return found


def check(place, expected, found):
    path, log = place / "keel.h5", place / "log"
    said = log.read_text().split() if log.exists() else []
    if not path.exists():
        assert not said
        return
    found["draft"] += any(parts_folder(path).glob("seal.tmp-*"))
    found["parts"] += bool(find_parts(path))
    before = rows_of(path, expected)
    assert before >= (60 if said else 0)
    found["rows"] += before
    if "sealed" in said:
        assert not parts_folder(path).exists()
    with open_run(path) as run:
        found["sealed"] += run.history.sealed
        outcome = Outcome.ALREADY if run.history.sealed else Outcome.SEALED
    assert seal(path).outcome is outcome
    assert rows_of(path, expected) == before
    assert file_state(path) is FileState.CLOSED
    if outcome is Outcome.SEALED:
        assert list(place.glob("keel*")) == [path]


def rows_of(path, expected):
    """How many rows a run has, after every number was compared."""
    with open_run(path) as run:
        assert not run.live
        assert not run.notes
        rows = len(run.steps)
        assert run.steps.tolist() == list(range(rows))
        for group in run.groups.values():
            recorded = [row.values[group.name] for row in expected[:rows] if group.name in row.values]
            for name in (spec.name for spec in group.statistics):
                assert run[f"{group.name}/{name}"].values.tolist() == [row[name].tolist() for row in recorded]
            assert run.observed(group.name).all()
        assert run["scalars/loss"].values.tolist() == [row.scalars["loss"] for row in expected[:rows]]
        return rows


CLOSES = """
import os, signal, sys, warnings
from conftest import make_layout, make_row
from keelscope.store import sealer
from keelscope.store.writer import RunWriter
sealer._AT_ONCE, sealer._PATIENCE = 0, float(sys.argv[2])
layout = make_layout(40)
writer = RunWriter(sys.argv[1], layout)
for step in range(60):
    writer.append(make_row(layout, step))
if sys.argv[3] == "close":
    writer.close()
if sys.argv[3] == "killed":
    writer.close()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("patience", "end"), [(30, "close"), (0, "close"), (0, "exit"), (0, "killed")])
def test_a_long_run_is_sealed_by_a_process_of_its_own(tmp_path, python, make_layout, make_row, patience, end):
    path = tmp_path / "keel.h5"
    python(CLOSES, path, patience, end, check=end != "killed")
    deadline = time.monotonic() + 60
    while parts_folder(path).exists() or not is_sealed(path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert rows_of(path, [make_row(make_layout(40), step) for step in range(60)]) == 60


def is_sealed(path):
    with open_run(path) as run:
        return run.history.sealed


def test_the_process_that_seals_imports_no_torch_and_can_be_ended(tmp_path, write_part, make_layout, make_row):
    path, layout = tmp_path / "keel.h5", make_layout(40)
    write_part(path, layout, [make_row(layout, step) for step in range(60)])
    script = "import sys; from keelscope.store.sealing import main; code = main(sys.argv[1:])"
    script += "; print('torch' in sys.modules, code)"
    run = [sys.executable, "-c", script, str(path), "exact"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, text=True)
    process.send_signal(signal.SIGSTOP)
    with open_run(path) as opened:
        assert opened.steps.size == 60
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=100)
    assert out.split() == ["False", "0"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "0"]


def test_a_run_that_cannot_be_sealed_is_said_once_and_kept(tmp_path, layout, make_row, sealing, monkeypatch):
    from keelscope.errors import RecordingWarning
    from keelscope.store import sealing as module
    from keelscope.store.writer import RunWriter

    monkeypatch.setattr(module, "write_sealed", no_room)
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(make_row(layout, 0))
    with pytest.warns(RecordingWarning, match=r"was not compressed \(no room\); its rows are complete"):
        writer.close()
    with open_run(writer.path) as run:
        assert run.steps.tolist() == [0]


def no_room(*_):
    raise OSError("no room")


def test_watching_to_a_file_leaves_a_sealed_run(tmp_path, layout, make_row, sealing):
    from keelscope.store.writer import RunWriter

    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(make_row(layout, 0))
    run = writer.run()
    writer.close()
    assert is_sealed(writer.path)
    run.refresh()
    assert (run.live, run.steps.tolist()) == (False, [0])
    run.close()
