"""A disk that is full, gone or slow ends the recording with one warning, and never the training."""

from __future__ import annotations

import os
import threading
import time
import warnings

import h5py
import pytest

from keelscope.errors import RecordingWarning, RunFileError
from keelscope.store.commit import State
from keelscope.store.pace import Pace
from keelscope.store.reader import open_run
from keelscope.store.writer import RunWriter

FULL = """
import resource, sys, warnings
from conftest import make_layout, make_row
from keelscope.store.pace import Pace
from keelscope.store.writer import RunWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
layout = make_layout(200)
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    writer = RunWriter(sys.argv[1], layout, pace=Pace(delay=0.01, retry=0.02))
    for step in range(400):
        writer.append(make_row(layout, step))
        if step % 20 == 0:
            writer.flush()
            committed = writer._worker._parts.part.committer.rows
    writer.close()
print(len(caught), caught[0].category.__name__, committed, writer._worker.dropped)
print(caught[0].message)
"""


def test_a_file_that_cannot_grow_ends_the_recording_with_one_warning(tmp_path, python, make_layout, make_row):
    done = python(FULL, tmp_path / "keel.h5")
    counts, message = done.stdout.splitlines()
    number, category, committed, dropped = counts.split()
    assert (number, category) == ("1", "RecordingWarning")
    assert "keel.h5 stopped: File too large; " in message
    assert message.endswith("training goes on. What was committed can be read.")
    layout = make_layout(200)
    with open_run(tmp_path / "keel.h5") as run:
        series = run["gradients/norm"]
        assert 0 < int(committed) <= len(series)
        assert len(series) + int(dropped) == 400
        assert not run.live
        for step, values in zip(series.steps, series.values, strict=True):
            assert values.tolist() == make_row(layout, int(step)).values["gradients"]["norm"].tolist()


def test_a_run_that_ran_out_of_disk_opens_plainly_and_ends_with_its_last_whole_row(tmp_path, python):
    python(FULL, tmp_path / "keel.h5")
    with h5py.File(tmp_path / "keel.h5") as file:
        lengths = {len(file["gradients"][name][:]) for name in ("step", "norm", "rms", "quantiles", "observed")}
        lengths |= {len(file["scalars"][name][:]) for name in ("step", "loss", "wall_time")}
        assert len(lengths) == 1
        assert file["status"][0] == State.STOPPED


@pytest.fixture
def disk(monkeypatch):
    """A disk whose free space the test decides."""
    free = {"bytes": 10**12}
    real = os.statvfs

    def statvfs(path):
        found = list(real(path))
        found[1], found[4] = 1, free["bytes"]
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", statvfs)
    return free


def test_recording_stops_before_the_disk_is_full_and_resumes_when_there_is_room(
    tmp_path, layout, make_row, disk, quick
):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=quick)
    writer.append(make_row(layout, 0))
    writer.flush()
    disk["bytes"] = 10 * 2**20
    writer.append(make_row(layout, 1))
    with pytest.warns(RecordingWarning, match=r"stopped: only 10 MB are free on its disk, 64 MB are needed; training"):
        writer.flush()
    writer.append(make_row(layout, 2))
    assert writer._worker.dropped == 1
    disk["bytes"] = 10**12
    wait_until(lambda: writer._worker._state is State.LIVE)
    writer.append(make_row(layout, 3))
    writer.close()
    assert open_run(writer.path).steps.tolist() == [0, 1, 3]


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_run_that_could_not_be_finished_says_so_and_counts_what_it_lost(tmp_path, layout, make_row, disk, quick):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=quick)
    disk["bytes"] = 0
    for step in range(3):
        writer.append(make_row(layout, step))
    with pytest.warns(RecordingWarning, match="only 0 MB are free"):
        writer.close()
    run = open_run(writer.path)
    assert (run.steps.size, run.live, writer._worker.dropped) == (0, False, 3)


def test_an_unexpected_error_in_the_writer_thread_does_not_reach_training(
    tmp_path, layout, make_row, monkeypatch, quick
):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=quick)
    monkeypatch.setattr(writer._worker._parts.part.committer, "commit", lambda batch: 1 / 0)
    writer.append(make_row(layout, 0))
    with pytest.warns(RecordingWarning, match="stopped: division by zero"):
        writer.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        writer.append(make_row(layout, 1))
        writer.close()


def test_a_disk_that_hangs_costs_the_patience_once_and_then_only_rows(tmp_path, layout, make_row, monkeypatch):
    pace = Pace(batch=2, delay=0.01, capacity=8, patience=0.3)
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=pace)
    hang, real = threading.Event(), writer._worker._parts.part.committer.commit

    def commit(batch):
        hang.wait(60)
        real(batch)

    monkeypatch.setattr(writer._worker._parts.part.committer, "commit", commit)
    waits = []
    monkeypatch.setattr(writer._worker._wake, "wait_for", lambda condition, timeout: waits.append(timeout))
    with pytest.warns(RecordingWarning, match="the disk cannot keep up, rows are being lost"):
        append_steps(writer, layout, make_row, range(30))
    assert waits == [pace.patience]
    assert writer._worker.dropped == 30 - 8
    monkeypatch.undo()
    hang.set()
    writer.close()
    assert open_run(writer.path).steps.tolist() == list(range(8))


def append_steps(writer, layout, make_row, steps):
    for step in steps:
        writer.append(make_row(layout, step))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_folder_without_permission_is_one_clear_error(tmp_path, layout):
    tmp_path.chmod(0o500)
    with pytest.raises(RunFileError, match="cannot be created"):
        RunWriter(tmp_path / "keel.h5", layout)


def test_no_file_descriptors_left_is_one_clear_error(tmp_path, python):
    script = """
import os, resource, sys
from conftest import make_layout
from keelscope.errors import RunFileError
from keelscope.store.writer import RunWriter
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
while True:
    try:
        held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        break
try:
    RunWriter(sys.argv[1], make_layout())
except RunFileError as error:
    print(error)
"""
    done = python(script, tmp_path / "keel.h5")
    assert "The run file cannot be created" in done.stdout
    assert not list(tmp_path.glob("keel*"))
