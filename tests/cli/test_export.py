"""``keelscope export``: a thin layer, so only what it adds: names, options, messages."""

from __future__ import annotations

import csv
import errno
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from keelscope.export import FORMATS


@pytest.fixture
def keel(recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(recorded / "keel.h5", tmp_path / "keel.h5")
    return tmp_path / "keel.h5"


def test_beside_the_run_by_default(keelscope, keel):
    result = keelscope("export", "keel.h5", "--to", "csv")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith("keelscope: wrote keel.csv, ")
    with keel.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["group"] for row in rows} >= {"gradients", "outputs", "scalars"}


def test_options_narrow_what_is_written(keelscope, keel):
    words = ("--series", "gradients/rms", "--series", "outputs", "--sites", "*.1*", "--steps", "1:", "--out", "a.json")
    result = keelscope("export", "keel.h5", "--to", "json", *words, "--json")
    said = json.loads(result.out)
    assert (result.code, said["path"], said["format"]) == (0, "a.json", "json")
    series = json.loads((keel.parent / "a.json").read_text())["series"]
    names = {one["name"] for one in series}
    assert "gradients/rms" in names
    assert all(name == "gradients/rms" or name.startswith("outputs/") for name in names)
    assert {step for one in series for step in one["steps"]} == {1, 2}
    assert all(".1" in site for one in series for site in one["sites"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("keel.h5", "--to", "xls"), "xls"),
        (("keel.h5",), "--to"),
        (("keel.h5", "--to", "csv", "--series", "nothing"), "no series matches 'nothing'; groups are"),
        (("keel.h5", "--to", "csv", "--steps", "x"), "--steps 'x' is not FIRST:BEFORE"),
        (("keel.h5", "--to", "json", "--wide"), "json has no wide form"),
        (("keel.h5", "--to", "csv", "--out", "keel.h5"), "keel.h5 exists and is left as it is"),
        (("keel.h5", "--to", "csv", "--out", "keel.h5/a.csv"), "cannot be written"),
        (("gone.h5", "--to", "csv"), "run file"),
        (
            ("keel.h5", "--to", "csv", "--steps", "500:"),
            "no recorded step lies from 500 on; the run holds 3 steps from 0 to 2.",
        ),
        (("keel.h5", "--to", "parquet", "--out", "-"), "--out - prints text; parquet is none. Use csv or json"),
    ],
)
def test_what_is_wrong_is_one_sentence(keelscope, keel, words, message):
    before = keel.read_bytes()
    result = keelscope("export", *words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err
    assert keel.read_bytes() == before
    assert [path.name for path in keel.parent.iterdir()] == ["keel.h5"]


def test_a_dash_prints(keelscope, keel):
    words = ("export", "keel.h5", "--to", "csv", "--series", "gradients/rms")
    printed = keelscope(*words, "--out", "-")
    assert (printed.code, printed.err) == (0, "")
    keelscope(*words, "--out", "a.csv")
    assert printed.out == (keel.parent / "a.csv").read_text()
    assert sorted(path.name for path in keel.parent.iterdir()) == ["a.csv", "keel.h5"]


@pytest.mark.parametrize("to", ["csv", "json", "tensorboard"])
def test_a_full_disk_is_one_sentence(keelscope, keel, monkeypatch, to):
    pytest.importorskip("tensorboard")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    form = FORMATS[to]
    monkeypatch.setitem(FORMATS, to, replace(form, write=full))
    result = keelscope("export", "keel.h5", "--to", to, "--out", "there")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "there cannot be written: No space left on device." in result.err


def test_a_disk_that_fills_under_tensorboard_prints_no_traceback(keelscope, keel):
    """In a process of its own: files may grow to 600 bytes there."""
    pytest.importorskip("tensorboard")
    program = (
        "import resource, signal, sys; sys.dont_write_bytecode = True; "  # it would be cut short, without an error
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600)); from keelscope.cli import main; sys.exit(main())"
    )
    words = ("export", "keel.h5", "--to", "tensorboard", "--out", "there")
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1:] == ["keelscope: there cannot be written: File too large."]
    assert "Traceback" not in done.stderr
