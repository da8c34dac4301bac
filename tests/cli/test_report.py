"""`keelscope report` on runs and models, in every format; every wrong input is one sentence."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import h5py
import pytest
import torch

import keelscope as ks
from keelscope.store.parts import part_path

INPUT = ("--input", "float32[4,8]")


def test_run_as_text(keelscope, recorded):
    code, out, err = keelscope("report", str(recorded / "keel.h5"))
    assert (code, err) == (0, "")
    assert "flat" in out
    assert "sublayers.15" in out


def test_model_says_what_it_was_fed(keelscope, folder):
    code, out, _ = keelscope("report", "net.py:healthy", *INPUT)
    assert code == 0
    assert "target  net.py:healthy" in out
    assert "input   float32[4,8], random, seed 0" in out
    assert "loss    regression (mean square of the first floating output" in out


def test_json(keelscope, folder):
    code, out, _ = keelscope("report", "net.py:shrinking", *INPUT, "--json", "--loss", "sum")
    document = json.loads(out)
    assert code == 0
    assert document["headline"] == "vanishing"
    assert len(document["layers"]) == 24
    assert document["target"] == "net.py:shrinking"
    assert document["loss"] == "sum (the sum of the first floating output)"
    assert document["input"] == "float32[4,8], random, seed 0"


def test_csv_holds_every_layer(keelscope, folder):
    _, out, _ = keelscope("report", "net.py:shrinking", *INPUT, "--format", "csv")
    assert len(list(csv.DictReader(out.splitlines()))) == 24


def test_markdown(keelscope, folder):
    _, out, _ = keelscope("report", "net.py:shrinking", *INPUT, "-f", "markdown")
    assert "vanishing" in out.splitlines()[0]
    assert "- input: `float32[4,8], random, seed 0`" in out


@pytest.mark.parametrize(
    ("name", "start"), [("r.json", "{"), ("r.md", "#"), ("deep/er/r.txt", "target"), ("r.csv", "depth")]
)
def test_output_suffix_decides_the_format(keelscope, folder, name, start):
    code, out, err = keelscope("report", "net.py:ready", "--output", name)
    assert (code, out, err) == (0, "", f"keelscope: wrote {name}.\n")
    assert (folder / name).read_text().startswith(start)


def test_all_unfolds(keelscope, recorded):
    path = str(recorded / "keel.h5")
    folded, whole = (keelscope("report", path, *more).out for more in ((), ("--all",)))
    assert all(f"sublayers.{index} " in whole for index in range(16))
    assert len(whole.splitlines()) >= len(folded.splitlines())


def test_sites_narrow_the_table(keelscope, recorded):
    _, out, _ = keelscope("report", str(recorded / "keel.h5"), "--sites", "sublayers.1?", "--json")
    assert [layer["path"] for layer in json.loads(out)["layers"]] == [f"sublayers.{index}" for index in range(10, 16)]


def test_step(keelscope, recorded):
    _, out, _ = keelscope("report", str(recorded / "keel.h5"), "--step", "1", "--json")
    assert json.loads(out)["step"] == 1


def test_seed_decides_everything(keelscope, folder):
    words = ("report", "net.py:dropping", *INPUT, "--json")
    first, again, other = (keelscope(*words, "--seed", seed).out for seed in ("1", "1", "2"))
    assert first == again
    assert json.loads(first)["layers"] != json.loads(other)["layers"]


@pytest.mark.parametrize(
    ("words", "code"),
    [("vanishing", 1), ("error", 1), ("warning", 1), ("info, exploding", 1), ("exploding,flat", 0), ("non-finite", 0)],
)
def test_fail_on(keelscope, folder, words, code):
    result = keelscope("report", "net.py:shrinking", *INPUT, "--fail-on", words)
    assert result.code == code
    assert ("--fail-on:" in result.err) == bool(code)


@pytest.mark.parametrize("command", ["report", "compare"])
def test_an_empty_fail_on_is_refused(keelscope, recorded, command):
    runs = [str(recorded / "keel.h5")] * (1 if command == "report" else 2)
    result = keelscope(command, *runs, "--fail-on", "")
    assert result.code == 2
    assert "--fail-on is empty" in result.err


@pytest.mark.parametrize("words", ["report RUN", "compare RUN RUN", "export RUN --to csv -o -"])
def test_a_part_that_cannot_be_read_ends_with_code_2(keelscope, tmp_path, words):
    path = tmp_path / "run.h5"
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    with ks.watch(model, path) as watch:
        for _ in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            watch.step()
    part = part_path(path, 0, 1)
    part.parent.mkdir(exist_ok=True)
    part.write_bytes(b"no run file")
    result = keelscope(*(str(path) if word == "RUN" else word for word in words.split()))
    assert result.code == 2
    assert "A part is left out" in result.err


def test_a_healthy_model_passes(keelscope, folder):
    assert keelscope("report", "net.py:healthy", *INPUT, "--fail-on", "vanishing,exploding,dead,error").code == 0


def test_the_issues_bad_inputs(keelscope, folder):
    (folder / "not.h5").write_text("hello")
    with h5py.File(folder / "other.h5", "w") as file:
        file["x"] = [1.0]
    for words, sentence in {
        ("missing.h5",): "There is no run file: missing.h5.",
        ("missing",): "there is no run file missing, and it is no model either; a model is pkg.module:factory, ",
        (".",): ". is a folder; name one of not.h5, other.h5.",
        ("not.h5",): "not.h5 is not an HDF5 file",
        ("other.h5",): "other.h5",
        ("nowhere.py:make",): "there is no file nowhere.py; did you mean",
        ("nowhere_at_all:make",): "there is no module nowhere_at_all",
        ("net.py:helthy",): "net.py:helthy: no factory 'helthy' there; did you mean healthy?",
        ("net.py:boom",): "net.py:boom raised RuntimeError: no weights today (--debug shows where).",
        ("net.py:nothing",): "net.py:nothing returned None (is a return missing?); expected a torch.nn.Module",
        ("net.py:text",): "net.py:text returned a str; expected a torch.nn.Module",
        ("net.py:frozen", *INPUT): "no parameter that requires a gradient (all 2 parameters are frozen)",
        ("net.py:healthy",): 'comes without an input; add --input "float32[8,8]"',
        ("net.py:healthy", "--input", "float32[4,8"): "character 12 (the end): expected ',' or ']'",
        (
            "net.py:healthy",
            "--input",
            "float32[4,9]",
        ): "rejects the batch (RuntimeError: mat1 and mat2 shapes cannot be",
        ("net.py:healthy", *INPUT, "--loss", "net.py:per_entry"): "returned float32[4, 8], not one real number",
        ("net.py:healthy", *INPUT, "--loss", "mse"): "there is no loss 'mse'",
        ("net.py:healthy", *INPUT, "--batch", "net.py:x"): "give --input or --batch, not both.",
        ("net.py:healthy", *INPUT, "--sites", "x*"): "--sites 'x*' matches no layer; layers are 0",
        (
            "net.py:healthy",
            *INPUT,
            "--fail-on",
            "vanish",
        ): "--fail-on 'vanish' is no headline, rule or severity; use van",
        ("net.py:healthy", *INPUT, "--format", "html"): "--format html needs --output FILE.html.",
        ("net.py:healthy", *INPUT, "--json", "--format", "csv"): "--json and --format csv contradict each other",
        ("net.py:healthy", *INPUT, "--output", "net.py/x.md"): "--output net.py/x.md cannot be written",
        ("scheme:keal",): "there is no scheme 'keal'; did you mean keel",
        ("hf:config:gtp2",): "transformers has no architecture 'gtp2'; did you mean gpt2",
    }.items():
        code, out, err = keelscope("report", *words)
        assert (code, out) == (2, ""), words
        assert err.startswith("keelscope: "), words
        assert err.count("\n") == 1, err
        assert sentence in err, (words, err)


def test_options_of_a_model_on_a_run(keelscope, recorded):
    code, _, err = keelscope("report", str(recorded / "keel.h5"), "--loss", "lm")
    assert code == 2
    assert "--input, --batch and --loss belong to a model" in err
    code, _, err = keelscope("report", str(recorded / "keel.h5"), "--step", "99")
    assert code == 2
    assert "step 99 was not recorded; 3 steps are recorded, 0 to 2." in err


def run(folder, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keelscope", *words], capture_output=True, text=True, cwd=folder, check=False
    )


def test_debug_shows_the_factorys_own_traceback(folder):
    done = run(folder, "report", "net.py:boom", "--debug")
    assert done.returncode != 0
    assert 'raise RuntimeError("no weights today")' in done.stderr
    assert "FactoryError" in done.stderr


def test_a_run_is_reported_without_torch(folder, recorded):
    (folder / "torch.py").write_text("raise ImportError('this machine has no torch')")
    done = run(folder, "report", str(recorded / "keel.h5"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["headline"] == "flat"


@pytest.mark.parametrize("form", ["text", "csv", "json", "markdown"])
@pytest.mark.parametrize(("fail_on", "code"), [("exploding", 0), ("flat", 1)])
def test_closed_pipe_is_quiet(recorded, form, fail_on, code):
    """Whoever reads may stop: no word of it, and the verdict still decides the exit code."""
    words = ["report", str(recorded / "keel.h5"), "--all", "--format", form, "--fail-on", fail_on]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "keelscope", *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.returncode == code, done.stderr
    assert done.stderr == ("keelscope: --fail-on: flat.\n" if code else "")


def test_print_is_as_wide_as_the_terminal(recorded, monkeypatch):
    report = ks.report(recorded / "keel.h5")
    for columns, width in (("60", 60), ("130", 130), ("10", 40)):
        monkeypatch.setenv("COLUMNS", columns)
        assert max(map(len, str(report).splitlines())) == width


def test_a_rule_set_is_chosen(keelscope, folder):
    rows = json.loads(keelscope("report", "net.py:shrinking", *INPUT, "--rules", "classic", "--json").out)
    assert {finding["rule"].partition("_")[0] for finding in rows["findings"]} == {"classic"}
    assert rows["headline"] == "vanishing"
    result = keelscope("report", "net.py:shrinking", *INPUT, "--rules", "classical")
    assert (result.code, result.err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("options", "headline"),
    [
        ((), "vanishing"),
        (("--threshold", "vanishing=1000"), "drifting"),
        (("--thresholds", "limits.toml"), "drifting"),
        (("--thresholds", "limits.toml", "--threshold", "vanishing=2"), "vanishing"),
    ],
)
def test_a_threshold_is_changed(keelscope, folder, options, headline):
    (folder / "limits.toml").write_text("[thresholds]\nvanishing = 1000\n")
    found = json.loads(keelscope("report", "net.py:shrinking", *INPUT, *options, "--json").out)
    assert found["headline"] == headline


@pytest.mark.parametrize("setting", ["vanish=3", "vanishing=0", "vanishing"])
def test_a_threshold_that_cannot_be_used(keelscope, folder, setting):
    result = keelscope("report", "net.py:shrinking", *INPUT, "--threshold", setting)
    assert (result.code, result.err.count("\n")) == (2, 1)
