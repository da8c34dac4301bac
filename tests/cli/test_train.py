"""`train`, `demo` and `compare`: real recordings, side by side, kept when interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from keelscope.cli import demo_command
from keelscope.cli.recording import file_name, new_folder
from keelscope.store.reader import open_run

SMALL = ("--depth", "8", "--width", "16", "--heads", "2", "--batch-size", "2", "--length", "16")


def test_train_records_each_scheme(keelscope, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("all the world's a stage, and all the men and women merely players. " * 200)
    out = tmp_path / "runs"
    code, shown, err = keelscope(
        "train", "keel", "pre_ln", *SMALL, "--steps", "4", "--every", "2", "--text", str(text), "--out", str(out)
    )
    assert code == 0
    assert "keel" in shown
    assert "pre_ln" in shown
    for scheme in ("keel", "pre_ln"):
        assert f"keelscope: {scheme}: 4 steps, last loss " in err
        with open_run(out / f"{scheme}.h5") as run:
            assert run["gradients/rms"].steps.tolist() == [0, 2]
            assert run.info.config["scheme"] == scheme
            assert run.info.config["text"] == "text.txt"  # a run file names no folder of this machine
            assert np.isfinite(run["scalars/loss"].values).all()
            assert (run["gradients/rms"].of("sublayers.?").values > 0).all()


def test_every_loss_stands_beside_its_step(keelscope, tmp_path):
    """Whatever the schedule: recorded or not, the loss of step k is stored at step k."""
    losses = {}
    for every in ("1", "2", "3"):
        out = tmp_path / every
        keelscope("train", "keel", *SMALL, "--steps", "7", "--every", every, "--out", str(out))
        with open_run(out / "keel.h5") as run:
            series = run["scalars/loss"]
            losses[every] = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))
    assert sorted(losses["1"]) == list(range(7))
    assert losses["2"] == losses["3"] == losses["1"]


def test_a_second_training_keeps_the_first(keelscope, tmp_path):
    words = ("train", "keel", *SMALL, "--steps", "2", "--out", str(tmp_path))
    keelscope(*words)
    _, _, err = keelscope(*words)
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == ["keel-2.h5", "keel.h5"]
    assert "keel-2.h5" in err


def test_scheme_with_its_own_options(keelscope, tmp_path):
    code, shown, _ = keelscope("train", "keel?alpha=2", *SMALL, "--steps", "2", "--out", str(tmp_path), "--json")
    assert code == 0
    assert (tmp_path / "keel-alpha-2.h5").exists()
    assert json.loads(shown)["headline"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("keal",), "there is no scheme 'keal'; did you mean keel"),
        (("keel", "keel"), "scheme keel is named twice; name each once."),
        (("keel", "--depth", "7"), "scheme:keel: depth = 7 is odd"),
        (("keel?alhpa=2",), "scheme:keel: scheme keel has no option 'alhpa': did you mean 'alpha'?"),
        (("keel", "--steps", "0"), "steps = 0 cannot be used: give a whole number, 1 or more"),
        (("keel", "--text", "nowhere.txt"), "there is no text at nowhere.txt"),
        (("keel", "--heads", "5"), "scheme:keel: "),
    ],
)
def test_bad_input_costs_no_training(keelscope, tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = keelscope("train", *words)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_interruption_keeps_what_was_recorded(tmp_path):
    words = ["train", "keel", "post_ln", *SMALL, "--steps", "100000", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "keelscope", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    path = tmp_path / "keel.h5"
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "keel interrupted; what was recorded is kept." in err
    assert "keel" in out
    with open_run(path) as run:
        assert len(run.steps) >= 1
        assert not run.live
    assert not (tmp_path / "post_ln.h5").exists()


def test_demo(keelscope, tmp_path, monkeypatch):
    """At its depth, with a narrower stream."""
    monkeypatch.setitem(demo_command.SIZES, "width", 16)
    code, out, _ = keelscope("demo", "--steps", "2", "--out", str(tmp_path))
    assert code == 0
    folder = tmp_path / "demo-1"
    assert sorted(path.name for path in folder.glob("*.h5")) == ["keel.h5", "post_ln.h5", "pre_ln.h5"]
    assert f" dash {folder}\n" in out
    assert f" report {folder / 'keel.h5'}\n" in out
    for path in folder.glob("*.h5"):
        with open_run(path) as run:
            assert run.info.stacks[0].length == 64


def test_compare(keelscope, recorded):
    paths = [str(recorded / "keel.h5"), str(recorded / "post_ln.h5")]
    code, out, err = keelscope("compare", *paths)
    assert (code, err) == (0, "")
    assert "post_ln" in out
    document = json.loads(keelscope("compare", *paths, "--json").out)
    assert "post_ln" in json.dumps(document)


def test_compare_sentences(keelscope, recorded):
    keel = str(recorded / "keel.h5")
    assert "There is no run file: no.h5." in keelscope("compare", keel, "no.h5").err
    assert "compare takes 2 to 8 runs or models, not 9" in keelscope("compare", *[keel] * 9).err


def test_names_of_files_and_folders(tmp_path):
    assert file_name("keel?first_block='../x'") == "keel-first_block--..-x-.h5"
    assert [new_folder(tmp_path / "a", "demo").name for _ in range(2)] == ["demo-1", "demo-2"]


def test_progress_is_shown_on_a_terminal(tmp_path):
    pty = pytest.importorskip("pty")
    master, slave = pty.openpty()
    words = ["train", "keel", *SMALL, "--steps", "3", "--out", str(tmp_path)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-m", "keelscope", *words], stdout=subprocess.DEVNULL, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait() == 0
    assert b"3/3" in shown
    assert b"loss" in shown


def test_probes_are_chosen_by_name(keelscope, tmp_path):
    options = (*SMALL, "--steps", "2", "--out", str(tmp_path))
    assert keelscope("train", "pre_ln", "--probes", "gradients, tokens", *options)[0] == 0
    with open_run(tmp_path / "pre_ln.h5") as run:
        assert {key.partition("/")[0] for key in run.keys()} == {"gradients", "tokens", "scalars"}  # noqa: SIM118
    code, _, err = keelscope("train", "pre_ln", "--probes", "sublayer", *options)
    assert code == 2
    assert "did you mean" in err


def test_armed_by_the_loss(keelscope, tmp_path):
    """A z that every second loss reaches: the steps after the first such are recorded."""
    options = ("--steps", "40", "--every", "30", "--arm", "3", "--arm-z", "0.001", "--out", str(tmp_path))
    keelscope("train", "pre_ln", *SMALL, *options)
    with open_run(tmp_path / "pre_ln.h5") as run:
        assert set(run.steps.tolist()) > {0, 30}
        assert "beside the schedule" in run.notes[-1]


def test_arming_takes_a_number_of_deviations(keelscope, tmp_path):
    done = keelscope("train", "pre_ln", *SMALL, "--arm", "3", "--arm-z", "0", "--out", str(tmp_path))
    assert done.code == 2
    assert "Arm needs steps >= 1, z > 0" in done.err
