"""Whatever the disk does, training goes on bit for bit, says so once, and is recorded again when the disk is back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from keelscope.store.reader import open_run

STEPS = 40

# All disks in one process with mounts of its own, which only it sees.
SCRIPT = """
import errno, hashlib, json, os, pathlib, resource, subprocess, sys, time, warnings
import torch
from torch import nn
import keelscope as ks
from keelscope.store import rotation
from keelscope.store.pace import Pace

place, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
soon = dict(batch=1, delay=0.0, retry=0.02)
found = {}

def train(path, at=None, **pace):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    watch = ks.watch(model, path, optimizer=optimizer, pace=Pace(**{**soon, **pace})) if path else None
    seen = hashlib.sha256()
    for step in range(steps):
        if watch and step in (at or {}):
            watch._settle()
            watch._journal._writer.flush()
            at[step]()
            time.sleep(0.05)
            wait_until_live(watch, step)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        if watch:
            watch.log(loss=loss)
            time.sleep(0.002)
        seen.update(loss.detach().numpy().tobytes())
    if watch:
        watch.close()
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
    return seen.hexdigest(), watch

def wait_until_live(watch, step):
    end = time.monotonic() + 30
    while step == 20 and watch._journal._writer._worker._state.name != "LIVE":
        assert time.monotonic() < end
        time.sleep(0.01)

def scenario(name, path, at, **pace):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result, watch = train(path, at, **pace)
    found[name] = {
        "identical": result == plain,
        "said": [str(warning.message) for warning in caught],
        "path": str(watch.path) if watch.path else None,
        "steps": watch.run["parameter_gradients/norm"].steps.tolist() if watch.path is None else None,
    }

def mount(folder, *options):
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)

def keep(folder):
    subprocess.run(["cp", "-r", str(folder), str(place / f"{folder.name}-kept")], check=True)

def fill(folder, spare):
    with (folder / "filler").open("wb") as filler:
        try:
            while os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize > spare:
                filler.write(bytes(4096))
                filler.flush()
        except OSError:
            pass

plain, _ = train(None)

mount(place / "full", "-t", "tmpfs", "-o", "size=80m", "tmpfs")
scenario("full", place / "full/run.h5", {
    10: lambda: fill(place / "full", 60 * 2**20),
    20: (place / "full/filler").unlink,
})
(place / "full/filler").unlink(missing_ok=True)
keep(place / "full")

rotation._MIN_FREE = 0
real_check, rotation._check_space = rotation._check_space, lambda *_: None
mount(place / "brimful", "-t", "tmpfs", "-o", "size=3m", "tmpfs")
scenario("brimful", place / "brimful/run.h5", {
    10: lambda: fill(place / "brimful", 0),
    20: (place / "brimful/filler").unlink,
}, part_rows=8)
(place / "brimful/filler").unlink(missing_ok=True)
keep(place / "brimful")
rotation._MIN_FREE, rotation._check_space = 64 * 2**20, real_check

mount(place / "sealed", "-t", "tmpfs", "-o", "ro", "tmpfs")
scenario("readonly", place / "sealed/run.h5", {})

mount(place / "far", "-t", "tmpfs", "tmpfs")
mount(place / "mounted", "--bind", str(place / "far"))
scenario("lost", place / "mounted/run.h5", {
    10: lambda: subprocess.run(["umount", "-l", str(place / "mounted")], check=True),
    20: lambda: mount(place / "mounted", "--bind", str(place / "far")),
})
keep(place / "mounted")

def remake():
    (place / "moved").mkdir()

scenario("moved", place / "moved/run.h5", {
    10: lambda: (place / "moved").rename(place / "elsewhere"),
    20: remake,
})

held = []
def hold():
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass

def let_go():
    while held:
        os.close(held.pop())

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
scenario("descriptors", place / "descriptors.h5", {8: hold, 20: let_go}, part_rows=5)

now = time.time
def jump(by):
    time.time = lambda: now() + by

scenario("clock", place / "clock.h5", {8: lambda: jump(-86400), 16: lambda: jump(3e8), 24: lambda: jump(-3e8)})
time.time = now
(place / "found.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    """What became of a training on each disk, and the folder that holds what it recorded."""
    place = tmp_path_factory.mktemp("disks")
    alone = [shutil.which("unshare"), "-rm"]
    if None in alone or subprocess.run([*alone, "mount", "-t", "tmpfs", "tmpfs", place], check=False).returncode:
        pytest.skip("no mounts can be made here")
    done = subprocess.run(
        [*alone, sys.executable, "-W", "error", "-c", SCRIPT, str(place), str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((place / "found.json").read_text()), place


def steps_of(path: Path) -> list[int]:
    with open_run(path) as run:
        assert not run.live
        return run["parameter_gradients/norm"].steps.tolist()


@pytest.mark.parametrize("name", ["full", "brimful", "readonly", "lost", "moved", "descriptors", "clock"])
def test_training_is_the_same_bit_for_bit(disks, name):
    assert disks[0][name]["identical"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "run.h5 stopped: only "),
        ("brimful", "run.h5 stopped: No space left on device"),
        ("readonly", "The run is kept in memory instead"),
        ("lost", "run.h5 stopped: its file is gone"),
        ("moved", "run.h5 stopped: its file is gone"),
    ],
)
def test_it_is_said_once(disks, name, message):
    (said,) = disks[0][name]["said"]
    assert message in said


@pytest.mark.parametrize("name", ["descriptors", "clock"])
def test_what_costs_no_row_is_not_said(disks, name):
    found, place = disks
    assert found[name]["said"] == []
    assert steps_of(place / f"{name}.h5") == [*range(STEPS)]


@pytest.mark.parametrize(
    ("name", "kept"), [("full", "full-kept"), ("brimful", "brimful-kept"), ("lost", "mounted-kept")]
)
def test_rows_before_are_there_and_recording_goes_on_after(disks, name, kept):
    found, place = disks
    steps = steps_of(place / kept / "run.h5")
    assert [step for step in steps if step < 10] == [*range(10)]
    assert [step for step in steps if step >= 22] == [*range(22, STEPS)]
    assert len(steps) < STEPS
    assert found[name]["path"].endswith("run.h5")
    assert not (place / kept.removesuffix("-kept") / "run.h5").exists()


def test_a_folder_that_is_moved_away_is_a_run_of_its_own(disks):
    _, place = disks
    assert steps_of(place / "elsewhere/run.h5") == [*range(10)]
    assert steps_of(place / "moved/run.h5")[-18:] == [*range(22, STEPS)]


def test_without_any_disk_the_run_is_in_memory(disks):
    assert disks[0]["readonly"]["path"] is None
    assert disks[0]["readonly"]["steps"] == [*range(STEPS)]
