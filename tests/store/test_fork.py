"""Forked children of the training process (data loader workers) never write, whatever they do and however they end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keelscope.store.parts import find_parts
from keelscope.store.reader import open_run
from keelscope.store.superblock import CLOSED, WRITING_SWMR, parse

SCRIPT = """
import gc, os, sys
from conftest import make_layout, make_row
from keelscope.store.pace import Pace
from keelscope.store.reader import open_run
from keelscope.store.writer import RunWriter

def write_through_hdf5():
    file = writer._worker._parts.part.file
    file["status"][0] = 9.0
    file["gradients/norm"].resize(500, axis=0)
    file.flush()
    file.close()

def collect_garbage():
    globals().pop("writer")
    gc.collect()

def read_the_run():
    with open_run(writer.path) as run:
        assert run.live and len(run["gradients/norm"]) >= 20

def close():
    writer.flush()
    writer.close()

layout = make_layout()
writer = RunWriter(sys.argv[1], layout, pace=Pace(part_rows=int(sys.argv[2]), seal="never"))
children = [
    lambda: None,
    lambda: os._exit(0),
    lambda: [writer.append(make_row(layout, 1000 + n)) for n in range(100)],
    close,
    collect_garbage,
    write_through_hdf5,
    read_the_run,
    lambda: RunWriter(sys.argv[1], layout).append(make_row(layout, 1)),
]
for number, child in enumerate(children):
    for step in range(20 * number, 20 * number + 20):
        writer.append(make_row(layout, step))
    if number % 2:
        writer.flush()
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    part = writer._worker._parts.part.path
    print(status, part.open("rb").read(48)[11], flush=True)
    writer.flush()
writer.close()
"""


@pytest.fixture(scope="module", params=[1000, 30])
def forked(request, tmp_path_factory, environment):
    """What a run and its children leave behind: the file, and exit status and superblock flags after each child."""
    path = tmp_path_factory.mktemp("forked") / "keel.h5"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(path), str(request.param)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return path, [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def test_no_child_fails_or_marks_the_file_as_closed(forked):
    _, after = forked
    assert after == [(0, WRITING_SWMR)] * 8


def test_every_row_of_the_parent_and_none_of_a_child_is_in_the_file(forked, make_layout, make_row):
    path, _ = forked
    for file in (path, *find_parts(path).values()):
        assert parse(file.read_bytes()[:48]).flags == CLOSED
    run = open_run(path)
    assert run.steps.tolist() == list(range(160))
    expected = [make_row(make_layout(), step).values["gradients"]["norm"].tolist() for step in range(160)]
    assert run["gradients/norm"].values.tolist() == expected


def test_a_run_that_a_child_makes_is_its_own(forked):
    path, _ = forked
    assert open_run(path.with_name("keel-2.h5")).steps.tolist() == [1]
