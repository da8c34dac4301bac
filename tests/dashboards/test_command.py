"""The command: options, what may be bound, the port, the sentence for a bad target."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from keelscope.errors import NotARunFileError, UsageError
from keelscope_dashboards import command
from keelscope_dashboards.command import add_command
from keelscope_dashboards.server import allowed_hosts, serve


@pytest.fixture
def line() -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    add_command(app)
    return app


def test_the_command_lists_its_options(line: typer.Typer) -> None:
    shown = CliRunner().invoke(line, ["dash", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
    assert shown.exit_code == 0
    for option in ("--port", "--host", "--allowed-host", "--no-browser"):
        assert option in shown.output


@pytest.mark.parametrize("name", ["none.h5", "nosuch"])
def test_a_missing_run_is_one_sentence(tmp_path: Path, name: str) -> None:
    words = [sys.executable, "-m", "keelscope", "dash", str(tmp_path / name), str(tmp_path), "--no-browser"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{name} does not exist; name a run file or a folder of run files." in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """The targets of every server that the command would have started."""
    started: list[list[Path]] = []
    monkeypatch.setattr(command, "_serve", lambda targets, **_: started.append(list(targets)))
    return started


@pytest.mark.parametrize("name", ["text.h5", "text.txt"])
def test_a_file_that_is_no_run_is_refused_alone_and_noted_beside_others(
    line: typer.Typer, serving: list[list[Path]], tmp_path: Path, name: str
) -> None:
    text = tmp_path / name
    text.write_text("not a run")
    alone = CliRunner().invoke(line, ["dash", str(text)])
    assert isinstance(alone.exception, NotARunFileError)
    assert f"{text} is not an HDF5 file" in str(alone.exception)
    assert serving == []
    beside = CliRunner().invoke(line, ["dash", str(text), str(tmp_path)])
    assert beside.exit_code == 0
    assert beside.stderr.startswith(f"keelscope: note: {text} is not an HDF5 file")
    assert serving == [[text, tmp_path]]


def test_runs_empty_folders_and_the_folder_to_come_start_without_a_word(
    line: typer.Typer, serving: list[list[Path]], kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    run = kit.write_run(tmp_path / "keel.h5", "keel", layers=4, steps=2)
    for arguments in ([str(run)], [str(empty)], []):
        done = CliRunner().invoke(line, ["dash", *arguments])
        assert (done.exit_code, done.output) == (0, "")
    assert serving == [[run], [empty], [Path("runs")]]


def test_loading_the_command_imports_neither_dash_nor_flask() -> None:
    heavy = ("dash", "flask", "plotly", "torch")
    code = f"import sys, keelscope_dashboards.command; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_loopback_is_enough_by_default() -> None:
    assert allowed_hosts("127.0.0.1", []) == {"127.0.0.1", "localhost", "::1"}
    assert "box.lan" in allowed_hosts("192.168.0.7", ["box.lan"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", ""])
def test_listening_everywhere_needs_a_name(host: str) -> None:
    with pytest.raises(UsageError, match="say under which name browsers reach it: --allowed-host NAME"):
        allowed_hosts(host, [])
    assert "box.lan" in allowed_hosts(host, ["box.lan"])


@pytest.mark.timeout(60)
def test_a_taken_port_is_passed_over_the_address_is_said_and_ctrl_c_ends_it(kit: ModuleType, tmp_path: Path) -> None:
    kit.write_run(tmp_path / "keel.h5", "keel", layers=4, steps=3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = [sys.executable, "-m", "keelscope", "dash", str(tmp_path), "--no-browser", "--port", str(port)]
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as process:
            try:
                url = _line(process).split()[2]
                assert url != f"http://127.0.0.1:{port}/"
                with urllib.request.urlopen(f"{url}api/v1/state", timeout=30) as answer:
                    assert [run["name"] for run in json.load(answer)["runs"]] == ["keel"]
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=30) == 0
                assert _line(process) == "Stopped.\n"
            finally:
                process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_no_free_port_is_one_sentence(kit: ModuleType, tmp_path: Path) -> None:
    sentence = r"No port from 50000 on can be bound on 192\.0\.2\.1: .*; choose others with --port and --host"
    with kit.served(tmp_path) as app, pytest.raises(UsageError, match=sentence):
        serve(app.app.server, host="192.0.2.1", port=50_000, browser=False, say=print)
