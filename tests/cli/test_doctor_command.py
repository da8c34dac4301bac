from __future__ import annotations

import errno
import json

import h5py
import numpy as np
import pytest
import torch

import keelscope as ks
from keelscope.cli import main
from keelscope.store import examination
from keelscope.store.pace import Pace
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, StatisticSpec
from keelscope.store.writer import RunWriter


@pytest.fixture
def run(tmp_path):
    groups = (GroupSpec("gradients", (StatisticSpec("rms", "1", "rms"),), (Site("a", "Linear"),)),)
    writer = RunWriter(tmp_path / "keel.h5", RunLayout(RunInfo("t", "id", ""), groups), pace=Pace(seal="never"))
    for step in range(5):
        writer.append(Row(step, 0.0, {"gradients": {"rms": np.ones(1)}}))
    writer.close()
    return writer.path


def test_it_says_what_there_is(run, capsys):
    assert main(["doctor", str(run)]) == 0
    said = capsys.readouterr().out
    assert "keel.h5: finished, 5 rows, steps 0 to 4" in said
    assert "Every number can be read." in said


def test_rows_of_scalars_alone_are_told_from_those_with_statistics(tmp_path, capsys):
    model, path = torch.nn.Linear(2, 1), tmp_path / "few.h5"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ks.watch(model, path, optimizer=optimizer, every=4) as session:
        for _ in range(10):
            model(torch.ones(3, 2)).sum().backward()
            optimizer.step()
            session.log(loss=1.0)
    assert main(["doctor", str(path)]) == 0
    assert ", 10 rows, steps 0 to 9, statistics on 3 of them" in capsys.readouterr().out


def test_json_and_repair(run, capsys):
    assert main(["doctor", str(run), "--repair", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert (found["state"], found["rows"], found["sound"]) == ("sealed", 5, True)
    assert found["done"][0].startswith("Sealed into one file")


def test_damage_is_exit_code_1_and_bad_input_2(run, tmp_path, capsys):
    run.write_bytes(b"nothing")
    assert main(["doctor", str(run)]) == 1
    assert "Something is damaged" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "none.h5")]) == 2
    assert main(["doctor", str(run), "--precision", "3bit"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_link_is_followed_and_a_folder_named(run, tmp_path, capsys):
    link = tmp_path / "latest.h5"
    link.symlink_to(run)
    assert main(["doctor", str(link)]) == 0
    assert "keel.h5: finished, 5 rows, steps 0 to 4" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path)]) == 2
    assert f"{tmp_path} is a folder; give the path of a run file, such as" in capsys.readouterr().err


def test_a_repair_that_fails_is_no_success(run, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(examination, "seal", full)
    assert main(["doctor", str(run), "--repair"]) == 1
    said = capsys.readouterr().out
    assert "The run was not sealed: [Errno 28] No space left on device. No file was changed." in said
    assert "Every number can be read." in said


def test_a_live_file_that_was_cut_says_what_to_do(run, capsys):
    content = run.read_bytes()
    run.write_bytes(content[: len(content) // 3])
    assert main(["doctor", str(run)]) == 1
    said = capsys.readouterr().out
    assert "cut off" in said
    assert "opy it again from where it came" in said


@pytest.mark.parametrize(("writer", "advice"), [("9.1.0", "install keelscope 9.1.0 or newer"), ("", "was changed")])
def test_a_newer_format_says_what_to_do(run, writer, advice, capsys):
    with h5py.File(run, "a") as file:
        file.attrs["keelscope_schema"] = "9.0"
        if writer:
            file.attrs["creation_library_version"] = writer
    assert main(["report", str(run)]) == 2
    said = capsys.readouterr().err
    assert "has format 9.0, this keelscope reads up to 1." in said
    assert advice in said
