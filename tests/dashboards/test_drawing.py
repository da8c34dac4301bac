"""Charts as SVG: every point where it belongs, gaps left open, round ticks."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keelscope_dashboards.blocks import Span
from keelscope_dashboards.drawing import Chart, Curve, chart_svg, round_ticks


def drawn(*curves, **chart):
    return ET.fromstring(chart_svg(curves, Chart("step", "spoken <&>", **chart)))


def points(svg, name):
    (path,) = [p for p in svg.findall("path") if p.get("class") == name and len(re.findall("[ML]", p.get("d"))) > 1]
    return [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path.get("d"))]


def test_a_straight_line_is_straight_and_rises():
    line = points(drawn(Curve("a", np.arange(5.0), np.arange(5.0))), "run0")
    x, y = np.array(line).T
    np.testing.assert_allclose(np.diff(x), np.diff(x)[0], atol=0.2)
    np.testing.assert_allclose(np.diff(y), np.diff(y)[0], atol=0.2)
    assert y[0] > y[-1]


def test_gaps_stay_open_and_lonely_points_are_dots():
    y = np.array([1.0, 2.0, np.nan, 4.0, np.nan, np.nan])
    svg = drawn(Curve("a", np.arange(6.0), y), named=False)
    (path,) = svg.findall("path")
    assert [path.get("d").count(letter) for letter in "ML"] == [2, 1]
    assert len(svg.findall("circle")) == 1


def test_a_level_line_looks_level():
    _, y = np.array(points(drawn(Curve("a", np.arange(9.0), 0.01 * np.sin(np.arange(9.0)))), "run0")).T
    assert np.ptp(y) < 10


def test_names_are_escaped_and_told_apart():
    curves = [Curve(f"<{i}>", np.arange(3.0), np.arange(3.0) + i, i) for i in range(2)]
    text = chart_svg(curves, Chart("step", "s", bands=(Span(0, 1, "<b>"), Span(1, 2, "c"))))
    assert "&lt;0&gt;" in text
    assert "&lt;b&gt;" in text
    assert {"run0", "run1"} <= {p.get("class") for p in ET.fromstring(text).findall("path")}


def test_nothing_is_drawn_of_nothing():
    assert chart_svg([Curve("a", np.arange(3.0), np.full(3, np.nan))], Chart("step", "s")) == ""


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6), most=st.integers(2, 12))
def test_ticks_are_few_and_inside(low, span, most):
    ticks = round_ticks(low, low + span, most)
    assert len(ticks) <= most + 1
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in ticks)


@pytest.mark.parametrize(("low", "high", "labels"), [(-0.3, 0.4, {"1", "2", "0.5"}), (-12.0, 0.0, {"1"})])
def test_labels_of_a_logarithmic_axis(low, high, labels):
    svg = drawn(Curve("a", np.arange(2.0), np.array([low, high])))
    assert labels <= {text.text for text in svg.findall("text")}
