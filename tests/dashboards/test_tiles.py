"""The heatmap as SVG: every cell has the colour of its level, marks win, long runs are bounded."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import numpy as np

from keelscope_dashboards.levels import Kind, LayerAxis, Levels
from keelscope_dashboards.pooling import pool
from keelscope_dashboards.theme import SHADES
from keelscope_dashboards.tiles import heatmap_svg, shades_of

MIDDLE = SHADES // 2


def levels_of(decades, kinds=None):
    decades = np.asarray(decades, dtype=np.float32)
    kinds = np.full(decades.shape, Kind.VALUE, dtype=np.uint8) if kinds is None else np.asarray(kinds, dtype=np.uint8)
    return Levels(decades, kinds, np.zeros(len(decades), np.float32), np.arange(len(decades), dtype=np.int64))


def axis_of(layers):
    return LayerAxis(
        tuple(f"layers.{i}" for i in range(layers)), ("Block",) * layers, tuple((i,) for i in range(layers))
    )


def painted(svg):
    """Class of every cell ``[row from the top][column]`` as the paths paint them."""
    root = ET.fromstring(svg)
    cells = {}
    for path in root.find("g").findall("path"):
        for column, row, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path.get("d")):
            for k in range(int(width)):
                assert (int(row), int(column) + k) not in cells
                cells[int(row), int(column) + k] = path.get("class")
    return cells


def test_every_cell_has_its_colour_with_the_input_at_the_bottom():
    decades = np.random.default_rng(0).uniform(-16, 16, (7, 5))
    levels = levels_of(decades)
    cells = painted(heatmap_svg(levels, axis_of(5), against="x"))
    codes = shades_of(pool(levels, 1))
    assert cells == {(4 - layer, step): f"k{codes[step, layer]}" for step in range(7) for layer in range(5)}


def test_shades_follow_the_level():
    codes = shades_of(pool(levels_of([[-16.0, -1.0, 0.0, 1.0, 16.0], [0.0] * 5]), 1))[0]
    assert codes[[0, 2, 4]].tolist() == [0, MIDDLE, SHADES - 1]
    assert codes[0] < codes[1] < codes[2] < codes[3] < codes[4]


def test_marks_have_their_own_class_and_what_is_absent_none():
    kinds = [[Kind.ZERO, Kind.NAN, Kind.INF, Kind.ABSENT], [Kind.VALUE] * 4]
    svg = heatmap_svg(levels_of(np.zeros((2, 4)), kinds), axis_of(4), against="x")
    cells = painted(svg)
    assert [cells.get((3 - layer, 0)) for layer in range(4)] == [f"k{SHADES}", f"k{SHADES + 1}", f"k{SHADES + 2}", None]
    assert all(name in svg for name in ("exactly 0", "NaN", "Inf"))


def test_a_long_deep_run_is_bounded_and_keeps_its_one_bad_cell():
    decades = np.random.default_rng(0).normal(size=(3000, 1000))
    kinds = np.full(decades.shape, Kind.VALUE)
    kinds[1234, 567] = Kind.NAN
    svg = heatmap_svg(levels_of(decades, kinds), axis_of(1000), against="x")
    assert len(svg) < 600_000
    assert list(painted(svg).values()).count(f"k{SHADES + 1}") == 1


def test_one_step_has_no_heatmap():
    assert heatmap_svg(levels_of([[0.0, 1.0]]), axis_of(2), against="x") == ""
