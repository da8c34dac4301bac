"""What is kept in memory of a run: within one budget, in parts, and one layer without the others."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from keelscope.store.memory import MemoryWriter
from keelscope.store.schema import GroupSpec, Row, RunLayout, StatisticSpec
from keelscope_dashboards import drawn, followed
from keelscope_dashboards.depth import parts_of, run_axis
from keelscope_dashboards.followed import FollowedRun
from keelscope_dashboards.panels import PANELS, series_panel


def opened(path: Path) -> FollowedRun:
    source = FollowedRun(path, path.stem)
    source.poll()
    assert source.error == ""
    return source


def test_all_runs_share_one_budget(kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = drawn.Budget(30_000)
    monkeypatch.setattr(followed, "BUDGET", budget)
    sources = [opened(kit.write_run(tmp_path / f"{i}.h5", "keel", layers=32, steps=60)) for i in range(4)]
    tiles = [source.tile(PANELS[0]) for source in sources]
    assert 10_000 < tiles[0].nbytes < 20_000
    assert budget.held <= 30_000
    again = sources[0].tile(PANELS[0])
    assert np.array_equal(again.deviations, tiles[0].deviations)
    for source in sources:
        source.close()
    assert budget.held == 0


def test_a_long_run_comes_in_parts_that_make_the_whole(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kit.write_run(tmp_path / "run.h5", "broken", layers=8, steps=50)
    whole = opened(path).tile(PANELS[0])
    monkeypatch.setattr(drawn, "SLICE", 80)
    source, seen = opened(path), []
    while not seen or source.behind(PANELS[0]):
        seen.append(len(source.tile(PANELS[0], seconds=0)))
    assert seen == sorted(set(seen))
    assert len(seen) > 5
    assert seen[-1] == len(whole) == 50
    part = source.tile(PANELS[0])
    assert np.array_equal(part.deviations, whole.deviations)
    assert np.array_equal(part.kinds, whole.kinds)


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_one_layer_is_read_without_the_others(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    source = opened(kit.write_run(tmp_path / "run.h5", "broken", layers=8, steps=50))
    for key in ("gradients/rms", "parameter_gradients/norm"):  # of which a layer has one site, and several
        panel = series_panel(key, scale="linear")
        whole = source.tile(panel).of(layer)
        monkeypatch.setattr(followed, "LONG", 1)
        alone = source.column(panel, layer)
        monkeypatch.undo()
        assert np.array_equal(alone.deviations, whole.deviations)
        assert np.array_equal(alone.kinds, whole.kinds)


def test_every_head_is_an_entry_of_its_own(kit: ModuleType) -> None:
    layout = kit.layout_of(3)
    sites = layout.groups[1].sites[1:]
    spec = StatisticSpec("entropy", "nat", "Entropy.", ("head",), {"head": (0.0, 1.0)})
    quantile = StatisticSpec("gain", "1", "Gain.", ("quantile",), {"quantile": (0.1, 0.9)})
    group = GroupSpec("attention", (spec, quantile), sites)
    writer = MemoryWriter(RunLayout(layout.info, (*layout.groups, group), layout.scalars))
    base = next(iter(kit.rows_of("keel", 3, 1)))
    heads = np.arange(6.0).reshape(3, 2)
    writer.append(Row(0, 0.0, {**base.values, "attention": {"entropy": heads, "gain": heads}}, base.scalars))
    run = writer.run()
    axis = run_axis(run, "attention/entropy")
    assert axis.labels[:2] == ("sublayers.0.head 0", "sublayers.0.head 1")
    assert axis.depths == (1, 1, 2, 2, 3, 3)
    assert parts_of(axis) == ("head 0", "head 1")
    assert parts_of(run_axis(run, "attention/gain")) == ("quantile 10 %", "quantile 90 %")
    source = FollowedRun(Path("run.h5"), "run", opener=lambda _: run)
    source.poll()
    second = source.tile(series_panel("attention/entropy", scale="linear", part="head 1"))
    assert second.deviations.tolist() == [[1.0, 3.0, 5.0]]
    monolith = source.profile(series_panel("attention/entropy", scale="linear"), 0)
    assert monolith.decades.ravel().tolist() == heads.ravel().tolist()
