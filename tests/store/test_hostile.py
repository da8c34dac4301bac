"""Every kind of `hostile_files`, from Python, from the command line and in the dashboard, in bounded memory and time.

Each is refused with one sentence or read without the harm; nothing hangs, crashes, prints a traceback or a secret.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hostile_files import KINDS

from keelscope.errors import NotARunFileError, RunFileError
from keelscope.store.reader import open_run
from keelscope.store.writer import RunWriter

PATIENCE = 120  # for all files together; one that hangs takes longer than any number of them

BOUNDED = """
import resource, sys, json
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
folder = Path(sys.argv[1])
paths = sorted(folder.glob("*.h5"))
"""

API = (
    BOUNDED
    + """
from keelscope.store.reader import open_run

def read(path, isolated):
    with open_run(path, isolated=isolated) as run:
        for key in run.keys():
            run[key]
        return ["read", repr(run) + run._repr_html_() + " ".join(run[run.keys()[0]].paths)]

def outcome(path, isolated):
    try:
        return read(path, isolated)
    except Exception as error:
        return [type(error).__name__, str(error)]

print(json.dumps({path.stem: [outcome(path, isolated) for isolated in (False, True)] for path in paths}))
"""
)

COMMANDS = (
    BOUNDED
    + """
import contextlib, io
from keelscope.cli import main

def outcome(*words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return [code, out.getvalue(), err.getvalue()]

good = sys.argv[2]
found = {path.stem: [outcome("report", str(path))] for path in paths}
for path in paths[::6]:
    found[path.stem].append(outcome("compare", good, str(path)))
for path in paths[1::6]:
    found[path.stem].append(outcome("export", str(path), "--to", "csv"))
print(json.dumps(found))
"""
)

DASHBOARD = """
import json, sys, time
from pathlib import Path
from keelscope_dashboards.app import create_app
from keelscope_dashboards.index import RunIndex
from keelscope_dashboards.state import run_states
from keelscope_dashboards.verdicts import Judge

folder = Path(sys.argv[1])
index, judge = RunIndex([folder]), Judge()
client = create_app(index, judge).server.test_client()
end = time.monotonic() + 60
states = []
while not states or any(one.verdict.headline == "pending" for one in states) and time.monotonic() < end:
    time.sleep(0.05)
    states = run_states(index, judge)
found = {}
for state in states:
    codes = [client.get(f"/api/v1/runs/{state.id}/{what}?panel=gradients/norm&step=3&layer=0").status_code
             for what in ("tile", "profile", "history", "table.csv")]
    found[state.name] = [state.status, state.error, codes]
page = client.get("/")
summary = client.get("/api/v1/state")
print(json.dumps([found, page.status_code, summary.status_code, summary.get_data(as_text=True)]))
judge.close()
index.close()
"""


@pytest.fixture(scope="module")
def good(tmp_path_factory, make_layout, make_row):
    writer = RunWriter(tmp_path_factory.mktemp("good") / "good.h5", make_layout())
    for step in range(20):
        writer.append(make_row(make_layout(), step))
    writer.close()
    return writer.path


@pytest.fixture(scope="module")
def corpus(good, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, (make, _) in KINDS.items():
        path = folder / f"{name}.h5"
        path.write_bytes(good.read_bytes())
        make(path)
    return folder


def run_all(script, environment, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def harmless(text):
    """No control characters, nothing of another file, no traceback."""
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), text
    assert "root:" not in text
    assert "Traceback" not in text
    return True


def one_sentence(text):
    return "\n" not in text.strip() and len(text) < 700 and text.rstrip().endswith((".", "'", "]"))


def test_there_are_enough_kinds():
    assert len(KINDS) >= 40
    assert sum(message is None for _, message in KINDS.values()) >= 10


def test_from_python(corpus, environment):
    outcomes = run_all(API, environment, corpus)
    assert outcomes.keys() == KINDS.keys()
    wrong = {}
    for name, (_, message) in KINDS.items():
        for kind, text in outcomes[name]:
            harmless(text)
            fine = kind == "read" if message is None else kind.endswith("Error") and re.search(message, text)
            if not fine or (message is not None and not one_sentence(text)) or kind not in KNOWN:
                wrong[name] = kind, text[:300]
    assert wrong == {}


KNOWN = {"read", "NotARunFileError", "RunFileError", "RunNotFoundError", "UnsupportedSchemaError"}


def test_from_the_command_line(corpus, good, environment):
    outcomes = run_all(COMMANDS, environment, corpus, good)
    wrong = {}
    for name, (_, message) in KINDS.items():
        for code, out, err in outcomes[name]:
            harmless(out.replace("\n", " ") + err.replace("\n", " "))
            refused = code == 2 and out == "" and err.startswith("keelscope: ") and one_sentence(err)
            read = code in {0, 2} and err.count("\n") <= 1
            if not (read if message is None else refused):
                wrong[name] = code, out[:200], err[:300]
    assert wrong == {}


def test_in_the_dashboard(corpus, environment):
    found, page, summary, text = run_all(DASHBOARD, environment, corpus)
    assert (page, summary) == (200, 200)
    harmless(text.replace("\n", " "))
    assert str(corpus) not in text
    wrong = {}
    for name, (status, error, codes) in found.items():
        message = KINDS[name][1]
        listed = status in {"finished", "stopped"}
        refused = (status == "error" and one_sentence(error)) or (listed and set(codes) == {404})
        if not (listed if message is None else refused) or max(codes) >= 500:
            wrong[name] = status, error, codes
    assert wrong == {}
    missing = KINDS.keys() - found.keys()
    assert all(name.startswith("a_") for name in missing)  # what is no file is not listed
    assert len(missing) <= 6


def test_an_unreadable_file(good, tmp_path, python):
    path = tmp_path / "closed.h5"
    path.write_bytes(good.read_bytes())
    path.chmod(0)
    script = """
import os, sys
from keelscope.store import filesource
from keelscope.store.reader import open_run
if os.getuid() == 0:
    os.setuid(65534)
try:
    open_run(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error)
"""
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents[:3]:
        folder.chmod(0o755)
    assert re.match(r"RunFileError .*(cannot be read|ermission denied)", python(script, path).stdout)


def test_a_device():
    with pytest.raises(NotARunFileError, match="is not a regular file"):
        open_run("/dev/zero")


def test_a_file_that_grows_and_changes_while_it_is_read(good, tmp_path):
    """Another process copies over the file all the time: every read gives an error of ours or numbers."""
    path, content = tmp_path / "growing.h5", good.read_bytes()
    path.write_bytes(content)
    end, outcomes = time.monotonic() + 1.5, set()

    def copy():
        size = 0
        while time.monotonic() < end:
            size = (size + 4099) % len(content)
            with path.open("r+b") as file:
                file.truncate(size)
                file.seek(size)
                file.write(content[size:])

    thread = threading.Thread(target=copy)
    thread.start()
    while time.monotonic() < end:
        try:
            with open_run(path, isolated=True) as run:
                run["gradients/norm"]
            outcomes.add("read")
        except RunFileError as error:
            outcomes.add("refused" if str(path) in str(error) else str(error))
    thread.join()
    assert outcomes <= {"read", "refused"}
    assert open_run(path)["gradients/norm"].values.shape == (20, 6)
