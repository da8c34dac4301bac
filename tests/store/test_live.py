"""A run is read, by this process and by others, while it is written."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import h5py
import numpy as np
import pytest

from keelscope.errors import NotARunFileError
from keelscope.store import filesource, opening
from keelscope.store.lock import Writer
from keelscope.store.opening import FileState, file_state
from keelscope.store.reader import open_run
from keelscope.store.writer import RunWriter

READER = """
import sys
from conftest import make_layout, make_row
from keelscope.store.reader import open_run
import numpy as np

layout = make_layout()
run = open_run(sys.argv[1])
assert run.live
print("open", flush=True)
seen = checked = 0
while True:
    live = run.live
    before, grew = len(run["gradients/norm"]), run.refresh()
    rows = len(run["gradients/norm"])
    assert rows >= seen and (grew or rows == before), (rows, before, grew)
    for key in ("gradients/norm", "gradients/quantiles"):
        new = run.read(key, seen, rows)
        for step, values in zip(new.steps, new.values, strict=True):
            group, name = key.split("/")
            assert np.array_equal(values, make_row(layout, int(step)).values[group][name]), step
            checked += 1
    assert run["scalars/loss"].steps.tolist() == list(range(len(run.steps)))
    seen = rows
    if not live:
        break
print(seen, checked, run.live, flush=True)
"""


@pytest.fixture
def reader(environment):
    started = []

    def start(path):
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", READER, str(path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout.readline() == "open\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_other_processes_see_whole_rows_while_they_are_written(tmp_path, layout, make_row, quick, reader):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=quick)
    readers = [reader(writer.path) for _ in range(2)]
    for step in range(1500):
        writer.append(make_row(layout, step))
    writer.close()
    for process in readers:
        out, error = process.communicate(timeout=100)
        assert process.returncode == 0, error
        assert out.split() == ["1500", "3000", "False"]
    assert open_run(writer.path).steps.size == 1500


def test_the_writing_process_reads_its_own_run(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    run = writer.run()
    assert (run.live, run.steps.size, run.refresh()) == (True, 0, False)
    writer.append(make_row(layout, 0))
    writer.flush()
    assert run.steps.size == 0
    assert run.refresh()
    assert run["gradients/norm"].at(0).tolist() == make_row(layout, 0).values["gradients"]["norm"].tolist()
    assert not run.refresh()
    writer.append(make_row(layout, 1))
    writer.close()
    assert run.refresh()
    assert (run.live, run.steps.tolist()) == (False, [0, 1])
    run.close()


def test_a_reader_in_the_writing_process_does_not_keep_the_file_from_being_closed(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(make_row(layout, 0))
    run = writer.run()
    writer.close()
    assert file_state(writer.path) is FileState.CLOSED
    with h5py.File(writer.path) as file:
        assert file["gradients/norm"].shape == (1, 6)
    assert run["gradients/norm"].values.shape == (1, 6)


def test_a_finished_run_that_is_open_here_opens_with_other_libraries_too(tmp_path, layout):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.close()
    with open_run(writer.path), h5py.File(writer.path) as file:
        assert len(file["gradients/site"]) == 6


def test_reading_here_while_the_writer_thread_commits(tmp_path, layout, make_row, quick):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=quick)
    stop, problems = threading.Event(), []

    def read():
        run = open_run(writer.path)
        while not stop.is_set():
            run.refresh()
            series = run["gradients/norm"]
            for step, values in zip(series.steps[-20:], series.values[-20:], strict=True):
                if not np.array_equal(values, make_row(layout, int(step)).values["gradients"]["norm"]):
                    problems.append(step)

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(600):
        writer.append(make_row(layout, step))
    stop.set()
    thread.join()
    writer.close()
    assert not problems
    assert open_run(writer.path).steps.size == 600


def test_refresh_of_a_finished_run_finds_nothing(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(make_row(layout, 0))
    writer.close()
    run = open_run(writer.path)
    assert (run.refresh(), run.live) == (False, False)


def test_a_torn_piece_of_a_live_file_is_an_error_and_never_a_reader_that_waits(tmp_path, layout, make_row, monkeypatch):
    """A SWMR reader of these bytes would not come back from HDF5; each piece of metadata is torn in turn."""
    writer = RunWriter(tmp_path / "keel.h5", layout)
    for step in range(20):
        writer.append(make_row(layout, step))
    writer.flush()
    content = writer.path.read_bytes()
    writer.close()
    monkeypatch.setattr(filesource, "_PAUSE", 0.0)
    monkeypatch.setattr(opening, "find_writer", lambda *_: Writer.ELSEWHERE)
    torn, outcomes = tmp_path / "torn.h5", {"read": 0, "refused": 0}
    places = [found.start() for found in re.finditer(b"OHDR|OCHK|EA[HI]B|EAHD|FRHP|FHDB|BTHD|GCOL", content)]
    for place in places[::5]:
        torn.write_bytes(content[: place + 24] + bytes(40) + content[place + 64 :])
        assert file_state(torn) is FileState.LIVE
        outcomes[read_whole(torn)] += 1
    assert outcomes["refused"] > 10


def read_whole(path):
    try:
        with open_run(path) as run:
            for key in list(run.keys()):
                run[key]
            run.refresh()
    except NotARunFileError:
        return "refused"
    return "read"


def test_a_commit_that_is_met_half_way_is_read_again(tmp_path, layout, make_row, monkeypatch):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(make_row(layout, 0))
    writer.flush()
    content = writer.path.read_bytes()
    writer.close()
    monkeypatch.setattr(opening, "find_writer", lambda *_: Writer.ELSEWHERE)
    copy = tmp_path / "copy.h5"
    copy.write_bytes(content)
    run = open_run(copy)
    copy.write_bytes(content.replace(b"OHDR", b"----"))
    waits = []

    def the_writer_goes_on(seconds):
        waits.append(seconds)
        copy.write_bytes(content)

    monkeypatch.setattr(filesource.time, "sleep", the_writer_goes_on)
    assert (run.live, run.refresh()) == (True, False)
    assert len(waits) == 1
    assert run["gradients/norm"].values.shape == (1, 6)
    run.close()
