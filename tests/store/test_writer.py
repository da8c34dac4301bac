from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from dataclasses import replace

import h5py
import numpy as np
import pytest

from keelscope.errors import RecordingWarning, RunExistsError, RunFileError, UsageError
from keelscope.store.pace import Pace
from keelscope.store.reader import open_run
from keelscope.store.schema import Row
from keelscope.store.superblock import CLOSED, WRITING_SWMR, parse
from keelscope.store.writer import RunWriter

NEVER = Pace(batch=1000, delay=1000.0)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def flags(path):
    return parse(path.read_bytes()[:48]).flags


def test_the_file_is_there_and_readable_before_the_first_row(tmp_path, layout):
    writer = RunWriter(tmp_path / "new" / "folder" / "keel.h5", layout)
    with h5py.File(writer.path, "r", swmr=True, locking=False) as file:
        assert file["gradients/norm"].shape == (0, 6)
    assert open_run(writer.path).steps.size == 0
    writer.close()


def test_only_the_run_file_is_left_after_close(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    assert names_in(tmp_path) == ["keel.h5", "keel.h5.parts"]
    writer.append(make_row(layout, 0))
    writer.close()
    assert names_in(tmp_path) == ["keel.h5"]
    assert flags(writer.path) == CLOSED


def test_an_existing_run_is_never_overwritten(tmp_path, layout):
    paths = []
    for _ in range(3):
        writer = RunWriter(tmp_path / "keel.h5", layout)
        writer.close()
        paths.append(writer.path)
    assert paths == [tmp_path / "keel.h5", tmp_path / "keel-2.h5", tmp_path / "keel-3.h5"]


def test_anything_that_has_the_name_counts_as_existing(tmp_path, layout):
    (tmp_path / "keel.h5").symlink_to("nowhere")
    (tmp_path / "keel-2.h5").mkdir()
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.close()
    assert writer.path.name == "keel-3.h5"


def test_exists_error_refuses_and_leaves_nothing_behind(tmp_path, layout):
    (tmp_path / "keel.h5").write_text("precious")
    with pytest.raises(RunExistsError, match=r"give another name or exists='new'.*keel\.h5"):
        RunWriter(tmp_path / "keel.h5", layout, exists="error")
    assert names_in(tmp_path) == ["keel.h5"]
    assert (tmp_path / "keel.h5").read_text() == "precious"


def test_an_unknown_mode_is_refused(tmp_path, layout):
    with pytest.raises(UsageError, match="exists='overwrite' is not known"):
        RunWriter(tmp_path / "keel.h5", layout, exists="overwrite")
    assert not names_in(tmp_path)


def test_the_name_of_a_live_run_whose_file_was_deleted_is_not_reused(tmp_path, layout):
    first = RunWriter(tmp_path / "keel.h5", layout)
    first.path.unlink()
    second = RunWriter(tmp_path / "keel.h5", layout)
    assert second.path.name == "keel-2.h5"
    second.close()
    with pytest.warns(RecordingWarning, match=r"keel\.h5 stopped: No such file or directory"):
        first.close()


def test_processes_that_want_one_name_each_get_their_own(tmp_path, environment):
    script = """
import sys, subprocess, pathlib
from conftest import make_layout
from keelscope.store.writer import RunWriter
layout = make_layout()
sys.stdin.readline()
writer = RunWriter(pathlib.Path(sys.argv[1]) / "keel.h5", layout)
print(writer.path.name)
writer.close()
"""
    names = race(script, tmp_path, 6, environment)
    assert sorted(names) == sorted(["keel.h5", *(f"keel-{n}.h5" for n in range(2, 7))])
    assert names_in(tmp_path) == sorted(names)


def race(script, folder, n, environment):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(n)
    ]
    time.sleep(1.0)
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    names = [process.communicate(timeout=60)[0].strip() for process in started]
    assert all(process.returncode == 0 for process in started)
    return names


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path, layout):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFileError, match=r"folder of the run file cannot be created.*file"):
        RunWriter(tmp_path / "file" / "keel.h5", layout)


def test_rows_are_committed_sixteen_at_a_time(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=Pace(delay=1000.0))
    for step in range(15):
        writer.append(make_row(layout, step))
    time.sleep(0.2)
    assert open_run(writer.path).steps.size == 0
    writer.append(make_row(layout, 15))
    assert wait_for(lambda: open_run(writer.path).steps.size == 16)
    writer.close()


def test_a_single_row_is_committed_after_the_delay(tmp_path, layout, make_row, quick):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=quick)
    writer.append(make_row(layout, 3))
    assert wait_for(lambda: open_run(writer.path).steps.tolist() == [3])
    writer.close()


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_flush_makes_every_row_readable(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=NEVER)
    for step in range(100):
        writer.append(make_row(layout, step))
    writer.flush()
    assert open_run(writer.path).steps.size == 100
    writer.close()


def test_what_is_appended_may_change_afterwards(tmp_path, layout):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=NEVER)
    values = np.ones(6)
    writer.append(Row(0, 0.0, {"gradients": {"norm": values}}))
    values[:] = 2
    writer.close()
    assert open_run(writer.path)["gradients/norm"].at(0).tolist() == [1.0] * 6


def test_close_is_harmless_when_repeated_and_ends_appending(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(make_row(layout, 0))
    writer.close()
    writer.close()
    writer.flush()
    with pytest.raises(UsageError, match="is closed; no more rows"):
        writer.append(make_row(layout, 1))


def test_a_writer_that_is_forgotten_closes_its_file(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout, pace=NEVER)
    writer.append(make_row(layout, 0))
    del writer
    gc.collect()
    assert flags(tmp_path / "keel.h5") == CLOSED
    assert open_run(tmp_path / "keel.h5").steps.tolist() == [0]


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise KeyError('training failed')"])
def test_an_interpreter_that_ends_without_close_closes_the_file(tmp_path, python, end):
    script = f"""
import sys
from conftest import make_layout, make_row
from keelscope.store.writer import RunWriter
layout = make_layout()
writer = RunWriter(sys.argv[1], layout)
for step in range(5):
    writer.append(make_row(layout, step))
{end}
"""
    done = python(script, tmp_path / "keel.h5", check=False)
    assert "keelscope/store" not in done.stderr
    assert flags(tmp_path / "keel.h5") == CLOSED
    assert names_in(tmp_path) == ["keel.h5"]
    assert open_run(tmp_path / "keel.h5").steps.tolist() == [0, 1, 2, 3, 4]


def test_nothing_but_rows_changes_after_the_file_was_published(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    before = structure(writer.path)
    for step in range(40):
        writer.append(make_row(layout, step))
    writer.flush()
    assert structure(writer.path) == before
    assert flags(writer.path) == WRITING_SWMR
    writer.close()
    assert structure(writer.path) == before


def structure(path):
    found = {}

    def visit(name, item):
        found[name] = {key: str(value) for key, value in item.attrs.items() if not key.endswith("_LIST")}

    with h5py.File(path, "r", swmr=True, locking=False) as file:
        file.visititems(visit)
    return found


def test_live_files_use_the_v110_format_without_filters_in_small_chunks(tmp_path, make_layout):
    layout = make_layout(1000)
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.close()
    assert parse(writer.path.read_bytes()[:48]).version == 3
    with h5py.File(writer.path) as file:
        for group in ("gradients", "parameters"):
            for name in ("step", "norm", "observed"):
                assert not file[group][name]._filters
        assert file["gradients/norm"].chunks == (64, 256)
        assert file["gradients/norm"].maxshape == (None, 1000)
        assert file["scalars/loss"].chunks == (1024,)


def test_the_file_says_what_it_is(tmp_path, layout):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.close()
    with h5py.File(writer.path) as file:
        root = dict(file.attrs)
        group = dict(file["gradients"].attrs)
        assert file["status"][0] == 2.0
    assert root["Conventions"] == "CF-1.11"
    assert (root["keelscope_schema"], root["keelscope_kind"]) == ("1.2", "run")
    assert (root["training_library"], root["training_library_version"]) == ("torch", "2.13.0")
    assert (root["n_parameters"], root["seed"], root["default"]) == (1234, 7, "scalars")
    assert (group["keelscope_probe"], group["probe_version"]) == ("keelscope_probes:gradients", 3)
    assert group["provenance"] == '{"scale": "unscaled", "clip": "before"}'


def test_nothing_in_the_file_tells_who_or_where(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(make_row(layout, 0))
    writer.close()
    data = writer.path.read_bytes()
    for text in (os.uname().nodename, str(tmp_path), os.environ.get("HOME", "no home"), str(os.getpid())):
        assert len(text) < 4 or text.encode() not in data


def test_a_flush_in_the_middle_of_a_commit_waits_for_the_rows_after_it(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    report = writer._worker._parts.report

    def slow(state, dropped):
        time.sleep(0.2)  # rows and flush come while the first sixteen are committed
        report(state, dropped)

    writer._worker._parts.report = slow
    for step in range(20):
        writer.append(make_row(layout, step))
        time.sleep(0.05 if step == 15 else 0.0)
    writer.flush()
    assert open_run(writer.path).steps.size == 20
    writer.close()


def test_a_scalar_that_is_not_in_the_layout_is_one_warning_and_not_an_error(tmp_path, layout):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    with pytest.warns(RecordingWarning, match="scalar 'accuracy' is not in the layout") as caught:
        append_scalars(writer, accuracy=1.0, loss=2.0)
    writer.close()
    assert len(caught) == 1
    assert open_run(writer.path)["scalars/loss"].values.tolist() == [2.0, 2.0, 2.0]


def append_scalars(writer, **scalars):
    for step in range(3):
        writer.append(Row(step, 0.0, {}, scalars))


def test_a_layout_without_groups_or_scalars_is_a_valid_run(tmp_path, layout):
    bare = replace(layout, groups=(), scalars=(), coverage=())
    writer = RunWriter(tmp_path / "keel.h5", bare)
    writer.append(Row(5, 1.5, {}))
    writer.close()
    run = open_run(writer.path)
    assert (run.keys(), run.steps.tolist()) == (["scalars/wall_time"], [5])


def test_the_name_may_be_text_with_a_home_folder(tmp_path, layout, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    writer = RunWriter("~/keel.h5", layout)
    writer.close()
    assert writer.path == tmp_path / "keel.h5"
    assert open_run("~/keel.h5").path == tmp_path / "keel.h5"


def test_two_writers_in_one_process_do_not_disturb_each_other(tmp_path, layout, make_row):
    first, second = RunWriter(tmp_path / "keel.h5", layout), RunWriter(tmp_path / "keel.h5", layout)
    for step in range(30):
        first.append(make_row(layout, step))
        second.append(make_row(layout, step))
    first.close()
    second.append(make_row(layout, 30))
    second.close()
    assert [open_run(w.path).steps.size for w in (first, second)] == [30, 31]


def test_changing_the_working_folder_does_not_move_the_run(tmp_path, layout, make_row, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = RunWriter("keel.h5", layout)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    writer.append(make_row(layout, 0))
    writer.close()
    assert names_in(tmp_path / "elsewhere") == []
    assert open_run(tmp_path / "keel.h5").steps.tolist() == [0]
