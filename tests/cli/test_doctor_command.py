from __future__ import annotations

import json

import numpy as np
import pytest

from keelscope.cli import main
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
