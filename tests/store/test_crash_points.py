"""Every moment at which a small run can be killed: each state that its system calls leave behind, one after the other.

strace lists what the writer asked of the system from the first file to the last; the calls are made again, one by one,
in another folder, and after each of them the run is opened there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from keelscope.store.reader import open_run

ROWS, PART_ROWS = 4, 2

SCRIPT = f"""
import os, pathlib, sys
from conftest import make_row, make_small_layout
from keelscope.store.pace import Pace
from keelscope.store.writer import RunWriter

layout, path = make_small_layout(), pathlib.Path(sys.argv[1])
log = os.open(path.with_name("log"), os.O_WRONLY | os.O_CREAT)
writer = RunWriter(path, layout, pace=Pace(part_rows={PART_ROWS}))
for step in range({ROWS}):
    writer.append(make_row(layout, step))
    writer.flush()
    os.write(log, f"{{step + 1}}\\n".encode())
writer.close()
"""

CALLS = (
    "openat,write,pwrite64,pwritev,writev,ftruncate,truncate,link,linkat,unlink,unlinkat,rename,renameat,mkdir,rmdir"
)
LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
FILE = re.compile(r"(\d+)<([^>]*)>")
TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


class Replay:
    """Makes the calls of a trace again in a folder of its own.

    Args:
        recorded: the folder in which they were made.
        folder: where to make them again.
    """

    def __init__(self, recorded: Path, folder: Path) -> None:
        self._recorded, self._folder = str(recorded), folder
        self._open: dict[int, int] = {}
        self._places: dict[int, int] = {}

    def make(self, name: str, arguments: str, result: int) -> bool:
        """Make a call; False if it changes nothing in the folder, or failed when it was recorded."""
        if result < 0:
            return False
        act = getattr(self, f"_{name}", None)
        assert act is not None or self._recorded not in plain(arguments), f"{name} is not known"
        return bool(act is not None and act(arguments, result))

    def paths(self, arguments: str) -> list[Path]:
        texts = [unescaped(text).decode(errors="replace") for text in TEXT.findall(arguments)]
        return [self._folder / text[len(self._recorded) + 1 :] for text in texts if text.startswith(self._recorded)]

    def _openat(self, arguments: str, result: int) -> bool:
        self._open.pop(result, None)
        paths, flags = self.paths(arguments), arguments
        if not paths or paths[0].is_dir() or "O_DIRECTORY" in flags:
            return False
        wanted = [name for name in ("O_RDWR", "O_WRONLY", "O_CREAT", "O_EXCL", "O_TRUNC") if name in flags]
        self._open[result] = os.open(paths[0], sum(getattr(os, name) for name in wanted), 0o666)
        self._places[result] = 0
        return "O_CREAT" in wanted

    def _write(self, arguments: str, result: int) -> bool:
        return self._put(arguments, result, None)

    def _pwrite64(self, arguments: str, result: int) -> bool:
        return self._put(arguments, result, int(arguments.rpartition(",")[2]))

    def _put(self, arguments: str, result: int, place: int | None) -> bool:
        number = int(FILE.match(arguments)[1])
        if number not in self._open or not unescaped(FILE.match(arguments)[2]).decode().startswith(self._recorded):
            return False
        data = unescaped(TEXT.search(arguments)[1])[:result]
        assert len(data) == result
        if place is None:
            place = self._places[number]
            self._places[number] += result
        os.pwrite(self._open[number], data, place)
        return True

    def _ftruncate(self, arguments: str, result: int) -> bool:
        number = int(FILE.match(arguments)[1])
        if number in self._open:
            os.ftruncate(self._open[number], int(arguments.rpartition(",")[2]))
        return number in self._open

    def _link(self, arguments: str, result: int) -> bool:
        old, new = self.paths(arguments)
        os.link(old, new)
        return True

    def _rename(self, arguments: str, result: int) -> bool:
        old, new = self.paths(arguments)
        old.replace(new)
        return True

    def _unlink(self, arguments: str, result: int) -> bool:
        for path in self.paths(arguments):
            path.unlink()
        return bool(self.paths(arguments))

    def _mkdir(self, arguments: str, result: int) -> bool:
        for path in self.paths(arguments):
            path.mkdir()
        return bool(self.paths(arguments))

    def _rmdir(self, arguments: str, result: int) -> bool:
        for path in self.paths(arguments):
            path.rmdir()
        return bool(self.paths(arguments))

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def unescaped(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def plain(arguments: str) -> str:
    return TEXT.sub(lambda found: unescaped(found[1]).decode(errors="replace"), arguments)


def calls_of(trace: Path) -> list[tuple[str, str, int]]:
    """Name, arguments and result of every call; one that another thread interrupts is put together."""
    begun: dict[str, str] = {}
    found = []
    for line in trace.read_text().splitlines():
        thread = line.split()[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>")
            continue
        whole = begun.pop(thread) + line.partition("resumed>")[2] if "resumed>" in line else line
        match = LINE.match(whole)
        if match is not None:
            found.append((match[2], match[3], int(match[4])))
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, environment):
    """A run that was traced from beginning to end, and its calls."""
    folder = tmp_path_factory.mktemp("recorded")
    trace = tmp_path_factory.mktemp("trace") / "trace"
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    command = [strace, "-f", "-y", "-xx", "-s", "1000000", "-e", f"trace={CALLS}", "-o", str(trace)]
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT, str(folder / "keel.h5")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr.lower():
        pytest.skip("processes may not be traced here")
    assert done.returncode == 0, done.stderr
    return folder, calls_of(trace)


def test_a_run_killed_after_any_of_its_system_calls_holds_every_committed_row(
    tmp_path, recorded, make_small_layout, make_row
):
    folder, calls = recorded
    layout = make_small_layout()
    expected = np.array([make_row(layout, step).values["gradients"]["norm"] for step in range(ROWS)])
    replay, log = Replay(folder, tmp_path), tmp_path / "log"
    points = readable = 0
    for name, arguments, result in calls:
        if not replay.make(name, arguments, result):
            continue
        points += 1
        committed = len(log.read_text().split()) if log.exists() else 0
        if not (tmp_path / "keel.h5").exists():
            assert committed == 0
            continue
        readable += 1
        with open_run(tmp_path / "keel.h5") as run:
            assert not run.live
            assert run.steps.tolist() == list(range(len(run.steps)))
            assert len(run.steps) >= committed
            assert np.array_equal(run["gradients/norm"].values, expected[: len(run.steps)])
    replay.close()
    assert committed == ROWS
    assert points > readable > 100
    for file in folder.rglob("*.h5"):
        assert (tmp_path / file.relative_to(folder)).read_bytes() == file.read_bytes()
