"""A tile as CSV: true values, marks for what is none, and nothing a spreadsheet would run."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np

from keelscope_dashboards.levels import Kind, LayerAxis
from keelscope_dashboards.panels import series_panel
from keelscope_dashboards.pooling import Tile
from keelscope_dashboards.tables import tile_csv


def tile(rows: int = 1) -> Tile:
    kinds = np.array([[Kind.VALUE, Kind.ZERO, Kind.NAN], [Kind.INF, Kind.ABSENT, Kind.VALUE]], dtype=np.uint8)
    off = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, -0.5]], dtype=np.float32)
    steps = np.array([0, 10])
    return Tile(steps, steps + rows - 1, np.float32([-3.0, -2.0]), off, kinds, rows)


AXIS = LayerAxis(("=cmd()", 'b,"c"', "d"), ("", "", ""), ((0,), (1,), (2,)), "layer", (1, 3, 5))


def read(text: str) -> list[list[str]]:
    return list(csv.reader(line for line in io.StringIO(text) if not line.startswith("#")))


def test_values_are_absolute_and_marks_are_words() -> None:
    rows = read("".join(tile_csv(tile(), AXIS, series_panel("gradients/rms"), "run")))
    assert rows[0] == ["first_step", "last_step", "layer 1: =cmd()", 'layer 3: b,"c"', "layer 5: d"]
    assert rows[1] == ["0", "0", "0.01", "0", "nan"]
    assert rows[2][:4] == ["10", "10", "inf", ""]
    assert float(rows[2][4]) == float(f"{10**-2.5:.6g}")


def test_a_pooled_tile_says_so_and_comments_stay_on_their_line() -> None:
    text = "".join(tile_csv(tile(4), AXIS, series_panel("gradients/rms", scale="linear"), "a\nb,=1"))
    assert text.splitlines()[:2] == [
        "# gradients/rms of a b,=1",
        "# each row holds the value farthest from the reference of 4 recorded steps",
    ]
    assert read(text)[1][2] == "-2"


def test_the_answer_is_an_attachment(three_runs: Any) -> None:
    run = three_runs.judged()["keel"].id
    answer = three_runs.client.get(f"/api/v1/runs/{run}/table.csv?panel=gradient")
    assert answer.status_code == 200
    assert answer.headers["Content-Disposition"] == "attachment"
    assert answer.mimetype == "text/csv"
    assert len(read(answer.text)) == 61
    assert three_runs.client.get(f"/api/v1/runs/{run}/table.csv?panel=nothing").status_code == 404
    assert three_runs.client.get("/api/v1/runs/x/table.csv?panel=gradient").status_code == 404
