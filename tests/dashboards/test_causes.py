"""The waterfall of causes: what is drawn adds up to what was measured, as a Plotly figure and as SVG."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from keelscope.analysis.attribution import attribute
from keelscope.diagnosis import diagnose
from keelscope_dashboards import figures
from keelscope_dashboards.causes import extent, steps_of, waterfall_svg
from keelscope_dashboards.document import render
from keelscope_dashboards.theme import DARK

STACK = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "residual_stack.py")))
FORMS = {
    "post": {"post": True, "width": 32},
    "keel": {"pre": True, "post": True, "alpha": 64.0},
    "convex": {"alpha": 0.9, "beta": 0.1},
}


def report_of(form, depth=64, **options):
    return diagnose(STACK.recorded(STACK.measure(depth, **FORMS[form]), norm=form != "convex", **options))


@pytest.fixture(params=FORMS)
def attribution(request):
    return report_of(request.param).paths.main.attribution


def test_the_bars_lead_from_nothing_to_the_total(attribution):
    *causes, total = steps_of(attribution)
    assert total.is_total
    assert (total.start, total.end) == (0.0, attribution.total)
    assert causes[0].start == 0.0
    for before, after in pairwise(causes):
        assert after.start == pytest.approx(before.end, abs=0.01)
    assert causes[-1].end == pytest.approx(total.end, abs=0.01)


@pytest.mark.parametrize("palette", [figures.LIGHT, DARK], ids=lambda palette: palette.name)
def test_the_figure_draws_the_bars(attribution, palette):
    (trace,) = figures.waterfall(attribution, palette=palette).data
    steps = steps_of(attribution)
    assert list(trace.x) == [step.decades for step in steps]
    assert list(trace.y) == [step.title for step in steps]
    assert trace.measure[-1] == "total"
    assert set(trace.measure[:-1]) <= {"relative"}


def test_every_bar_of_the_drawing_is_as_long_as_its_decades(attribution):
    root = ET.fromstring(waterfall_svg(attribution))
    steps = steps_of(attribution)
    bars = [element for element in root.iter() if element.tag == "rect"]
    low, high = extent(steps)
    assert len(bars) == len(steps)
    for bar, step in zip(bars, steps, strict=True):
        assert float(bar.get("width")) == pytest.approx(max(1.0, 360 * abs(step.decades) / (high - low)), abs=0.06)
        assert bar.get("class") == ("total" if step.is_total else "lost" if step.decades < 0 else "gained")
    assert all(step.title in root.get("aria-label") for step in steps)


def test_what_is_level_looks_level():
    steps = steps_of(report_of("keel").paths.main.attribution)
    low, high = extent(steps)
    assert high - low == pytest.approx(1.0)
    assert low < 0 < high


def test_nothing_known_is_nothing_drawn():
    nothing = attribute(*[np.full(3, np.nan)] * 4)
    assert steps_of(nothing) == ()
    assert waterfall_svg(nothing) == ""
    assert len(figures.waterfall(nothing).data[0].x or ()) == 0


def test_the_page_says_why_and_asks_for_nothing():
    page = render(report_of("post", 128))
    assert "<h2>Why</h2>" in page
    assert "The norms on the sums" in page
    assert 'class="gap">...</td>' in page
    for outside in ("http:", "https:", "<script", "src=", "@import", "url("):
        assert outside not in page
    shown = int(re.search(r"Sub-layers, (\d+) of 128", page).group(1))
    assert shown == len(re.findall(r"<td>layers\.\d+\.branch\d</td>", page))


def test_short_stacks_are_listed_whole_and_streams_apart():
    page = render(report_of("post", 32, streams=[0] * 20 + [1] * 12))
    assert "Sub-layers, all 20" in page
    assert re.findall(r'<tr><td class="n">(\d)</td><td class="n">(\d+)</td>', page) == [("0", "20"), ("1", "12")]


def test_labels_of_a_run_are_escaped():
    values = STACK.measure(8, post=True)
    page = render(diagnose(STACK.recorded(values, form="<script>alert(1)</script>", norm=True)))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_without_gradients_there_is_no_figure():
    values = {name: np.full(8, np.nan) for name in STACK.SUBLAYER}
    run = STACK.recorded({**values, "alpha": np.ones(8)})
    page = render(diagnose(run))
    assert 'class="waterfall" ' not in page
    assert "<figure>" not in page
