"""A run read by another process is the same run, and what happens to that process happens to nothing else."""

from __future__ import annotations

import json
import os
import signal
import sys

import numpy as np
import pytest

from keelscope.errors import NotARunFileError, RunFileError, RunNotFoundError, SeriesNotFoundError, UsageError
from keelscope.store import isolated
from keelscope.store.columns import Columns
from keelscope.store.frames import BrokenFrameError, pack, plain, rebuilt, receive, send
from keelscope.store.reader import open_run
from keelscope.store.schema import RunInfo, RunLayout, Site, SublayerInfo
from keelscope.store.writer import RunWriter


@pytest.fixture
def writer(tmp_path, layout, make_row):
    made = RunWriter(tmp_path / "keel.h5", layout)
    for step in range(6):
        made.append(make_row(layout, step))
    made.flush()
    yield made
    made.close()


def test_everything_is_as_if_it_were_read_here(writer):
    writer.close()
    with open_run(writer.path) as here, open_run(writer.path, isolated=True) as there:
        assert there._source.layout == here._source.layout
        assert (there.path, there.live, there.stopped, repr(there)) == (here.path, here.live, here.stopped, repr(here))
        for key in here.keys():  # noqa: SIM118 - a run is no mapping
            np.testing.assert_array_equal(there[key].values, here[key].values)
            np.testing.assert_array_equal(there[key].steps, here[key].steps)
        some = {"start": -3, "stop": None, "sites": slice(1, 4)}
        np.testing.assert_array_equal(
            there.read("gradients/norm", **some).values, here.read("gradients/norm", **some).values
        )
        np.testing.assert_array_equal(there.observed("gradients", **some), here.observed("gradients", **some))
        assert there.read("gradients/norm", 3, 3).values.shape == (0, 6)
        with pytest.raises(SeriesNotFoundError, match="does not hold 'gradients/x'"):
            there["gradients/x"]
    with pytest.raises(UsageError, match="was closed"):
        there["gradients/norm"]


def test_a_live_run_is_followed_to_its_end(writer, layout, make_row):
    run = open_run(writer.path, isolated=True)
    assert (run.live, len(run.steps), run.refresh()) == (True, 6, False)
    writer.append(make_row(layout, 6))
    writer.flush()
    assert run.refresh()
    assert run["gradients/norm"].at(6).tolist() == make_row(layout, 6).values["gradients"]["norm"].tolist()
    writer.close()
    run.refresh()
    assert (run.live, run.stopped) == (False, False)
    run.close()


def test_a_reading_process_that_dies_is_replaced_and_runs_go_on(writer):
    run = open_run(writer.path, isolated=True)
    before = run["gradients/norm"].values
    os.kill(isolated._READER._process.pid, signal.SIGKILL)
    np.testing.assert_array_equal(run["gradients/norm"].values, before)
    run.close()


def test_a_file_on_which_the_reading_process_hangs_or_dies_is_refused(writer, monkeypatch):
    monkeypatch.setattr(isolated, "PATIENCE", 0.2)
    other = open_run(writer.path, isolated=True)
    first = isolated._READER._process.pid
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(NotARunFileError, match=r"is damaged or made to do harm: HDF5 cannot read it \(it did not"):
        open_run(writer.path, isolated=True)
    monkeypatch.undo()
    assert other["gradients/norm"].values.shape == (6, 6)
    assert isolated._READER._process.pid != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    other.close()


def test_a_slow_start_is_waited_for_and_none_at_all_is_no_fault_of_the_file(writer, monkeypatch, tmp_path):
    isolated._READER.end()
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text("import time\ntime.sleep(3)\n")
    monkeypatch.setattr(isolated, "PATIENCE", 2.5)
    monkeypatch.setattr("sys.path", [str(tmp_path / "slow"), *sys.path])
    open_run(writer.path, isolated=True).close()
    isolated._READER.end()
    empty = tmp_path / "keelscope"
    empty.mkdir()
    (empty / "__init__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunFileError, match="was not read: the process that reads run files did not start"):
        open_run(writer.path, isolated=True)
    monkeypatch.undo()
    open_run(writer.path, isolated=True).close()


def test_errors_are_those_of_the_file(tmp_path):
    (tmp_path / "text.h5").write_text("no")
    for path in (tmp_path / "gone.h5", tmp_path / "text.h5", tmp_path):
        with pytest.raises((RunNotFoundError, NotARunFileError)) as here:
            open_run(path)
        with pytest.raises(type(here.value)) as there:
            open_run(path, isolated=True)
        assert (str(there.value), there.value.filename) == (str(here.value), here.value.filename)


def test_the_reading_process_ends_with_its_owner(writer, python):
    script = """
import sys
from keelscope.store import isolated
from keelscope.store.reader import open_run
run = open_run(sys.argv[1], isolated=True)
print(isolated._READER._process.pid)
"""
    pid = int(python(script, writer.path).stdout)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("array", [None, np.arange(6.0).reshape(2, 3), np.empty((0, 4), np.int64), np.array([True])])
def test_a_message_arrives_as_it_was_sent(pipe, array):
    send(pipe[1], pack({"a": [1, None, float("inf")]}, array))
    message, found = receive(pipe[0], 1000, 5.0)
    assert message["a"] == [1, None, float("inf")]
    assert (found is None) == (array is None)
    if array is not None:
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "in time"),
        (b"\xff" * 16, "a message of"),
        ((2).to_bytes(8, "little") + (99).to_bytes(8, "little") + b"{}", "a message of"),
        ((2).to_bytes(8, "little") + bytes(8) + b"[", "in time"),
        ((2).to_bytes(8, "little") + bytes(8) + b"[)", "Expecting"),
        ((31).to_bytes(8, "little") + bytes(8) + b'{"dtype": "O8", "shape": [1000]}'[:31], "."),
    ],
)
def test_what_is_no_message_is_an_error(pipe, content, reason):
    os.write(pipe[1], content)
    with pytest.raises(BrokenFrameError, match=reason):
        receive(pipe[0], 10, 0.05)


def test_records_in_columns_arrive_as_a_tuple():
    known = (SublayerInfo("x + F(x)", ("pre_ln",), alpha=1.0), SublayerInfo("unknown", gates=("a",)))
    info = RunInfo("t", "id", "", sublayers=Columns(SublayerInfo, known))
    assert rebuilt(RunInfo, json.loads(json.dumps(info, default=plain))) == RunInfo("t", "id", "", sublayers=known)


def test_a_record_with_a_wrong_field_is_not_rebuilt():
    good = {"path": "a", "kind": "b", "role": "", "stack": "", "position": 1, "numel": 2, "aliases": ["c"]}
    assert rebuilt(Site, good) == Site("a", "b", "", "", 1, 2, ("c",))
    for name, value in (("path", 3), ("position", "1"), ("aliases", "c"), ("numel", None)):
        with pytest.raises(BrokenFrameError, match="is no"):
            rebuilt(Site, {**good, name: value})
    with pytest.raises(BrokenFrameError, match="RunLayout without 'info'"):
        rebuilt(RunLayout, {})
