"""A long sealed run is drawn from its overviews as it is from its rows."""

from __future__ import annotations

import numpy as np
import pytest

from keelscope.store import overview, sealedfile
from keelscope.store.pace import Pace
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, Stack, StatisticSpec
from keelscope.store.sealing import seal
from keelscope.store.writer import RunWriter
from keelscope_dashboards import drawn, overviews
from keelscope_dashboards.followed import FollowedRun
from keelscope_dashboards.panels import PANELS

PANEL = next(panel for panel in PANELS if panel.key == "gradients/rms")


@pytest.fixture
def path(tmp_path, monkeypatch):
    for module in (overview, sealedfile, overviews):
        monkeypatch.setattr(module, "LONG_RUN", 100)
    monkeypatch.setattr(drawn, "MAX_BINS", 10)
    sites = tuple(Site(f"layers.{i}", "Block", "layer", "layers", i) for i in range(8))
    groups = (GroupSpec("gradients", (StatisticSpec("rms", "1", "rms"),), sites),)
    info = RunInfo("t", "id", "", stacks=(Stack("layers", "Block", 8, 1, main=True),))
    writer = RunWriter(tmp_path / "keel.h5", RunLayout(info, groups), pace=Pace(seal="never"))
    for step in range(400):
        values = 10.0 ** (-np.arange(8) / 4)
        values[3] = 0.0 if step == 170 else np.inf if step == 200 else np.nan if step == 330 else values[3]
        values[5] *= 1e4 if step == 250 else 1.0
        observed = {"gradients": np.array([True] * 7 + [step < 300])}
        writer.append(Row(step, 0.0, {"gradients": {"rms": values}}, {}, observed))
    writer.close()
    return writer.path


def test_bins_are_those_of_the_rows(path):
    rows = tile_of(path)
    seal(path)
    bins = tile_of(path)
    assert bins.rows == rows.rows == 64
    assert bins.first.tolist() == rows.first.tolist()
    assert bins.last.tolist() == rows.last.tolist()
    assert bins.kinds.tolist() == rows.kinds.tolist()
    assert np.allclose(bins.deviations, rows.deviations, atol=1e-3)


def test_rows_are_not_read(path, monkeypatch):
    seal(path)
    asked = []
    original = drawn.levels_between

    def watched(run, panel, start, stop):
        asked.append(start)
        return original(run, panel, start, stop)

    monkeypatch.setattr("keelscope_dashboards.followed.levels_between", watched)
    tile_of(path)
    assert asked == [400]


def test_a_first_look_is_coarse_and_the_next_is_not(path, monkeypatch):
    seal(path)
    monkeypatch.setattr(overviews, "COARSER", 5)
    followed = FollowedRun(path, "keel")
    followed.poll()
    looks = [(followed.tile(PANEL, seconds=9.0).rows, followed.behind(PANEL)) for _ in range(3)]
    followed.close()
    assert looks == [(256, 400), (64, 0), (64, 0)]


def tile_of(path):
    followed = FollowedRun(path, "keel")
    followed.poll()
    tile = followed.tile(PANEL)
    followed.close()
    return tile
