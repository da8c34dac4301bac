from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

from keelscope.store.lock import Writer, WriterLock, find_writer, parts_folder

HOLDER = """
import os, pathlib, sys, time
from keelscope.store.lock import WriterLock
lock = WriterLock(pathlib.Path(sys.argv[1]))
orphan = os.fork() if len(sys.argv) > 2 else 1
if orphan:
    print(orphan, flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(environment):
    """Another process that holds the lock."""
    started = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, int(process.stdout.readline())

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def path(tmp_path):
    run = tmp_path / "keel.h5"
    run.write_text("")
    return run


def test_without_a_lock_there_is_no_writer(path):
    assert find_writer(path) is Writer.GONE


def test_the_process_that_holds_the_lock_finds_itself_and_keeps_the_lock(path):
    lock = WriterLock(path)
    for _ in range(3):
        assert find_writer(path) is Writer.HERE
    script = f"import pathlib; from keelscope.store.lock import *; print(find_writer(pathlib.Path({str(path)!r})))"
    seen = subprocess.run(
        ["setsid", "-f", "-w", sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "ELSEWHERE" in seen.stdout
    lock.release()
    assert find_writer(path) is Writer.GONE
    assert not parts_folder(path).exists()


def test_a_lock_of_another_process_is_seen_until_it_is_killed(path, holder):
    process, _ = holder(path)
    assert find_writer(path) is Writer.ELSEWHERE
    with pytest.raises(BlockingIOError):
        WriterLock(path)
    assert find_writer(path) is Writer.ELSEWHERE
    process.kill()
    process.wait()
    assert find_writer(path) is Writer.GONE
    WriterLock(path).release()


def test_a_forked_child_that_outlives_the_writer_does_not_hold_the_lock(path, holder):
    process, orphan = holder(path, "fork")
    process.kill()
    process.wait()
    try:
        os.kill(orphan, 0)
        assert find_writer(path) is Writer.GONE
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_child_finds_its_parent(path, python):
    lock = WriterLock(path)
    done = python(
        "import pathlib, sys; from keelscope.store.lock import *; print(find_writer(pathlib.Path(sys.argv[1])))", path
    )
    lock.release()
    assert "PARENT" in done.stdout


def test_a_note_of_an_earlier_process_with_this_number_is_not_believed(path):
    parts_folder(path).mkdir()
    (parts_folder(path) / "r00000.json").write_text(f'{{"pid": {os.getpid()}, "started": 1}}')
    assert find_writer(path) is Writer.GONE


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"pid": "x", "started": 2}', "\x00"])
def test_a_damaged_note_is_ignored(path, note):
    parts_folder(path).mkdir()
    (parts_folder(path) / "r00000.json").write_text(note)
    assert find_writer(path) is Writer.GONE


def test_where_locks_do_not_work_a_file_that_changes_counts_as_written(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock = WriterLock(path)
    (parts_folder(path) / "r00000.json").unlink()
    assert find_writer(path) is Writer.ELSEWHERE
    old = time.time() - 100
    os.utime(path, (old, old))
    assert find_writer(path) is Writer.GONE
    lock.release()


def test_other_files_in_the_folder_are_left_alone(path):
    lock = WriterLock(path)
    (parts_folder(path) / "r00000.p0001.h5").write_text("part")
    lock.release()
    assert [entry.name for entry in parts_folder(path).iterdir()] == ["r00000.p0001.h5"]
