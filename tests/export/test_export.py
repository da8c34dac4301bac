"""What other programs read from an exported run is what the run holds; each format with the library that reads it."""

from __future__ import annotations

import csv
import json
import struct
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest

from keelscope.errors import UnknownNameError, UsageError
from keelscope.export import FORMATS, Selection, export_run
from keelscope.export.selection import parsed_steps
from keelscope.store.memory import MemoryWriter
from keelscope.store.reader import open_run
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, StatisticSpec
from keelscope.store.writer import RunWriter

NAMES = ("block.0", "block,1", "=block", 'block "3"')


def layout_of(names=NAMES):
    sites = tuple(Site(name, "Linear") for name in names)
    plain = (StatisticSpec("rms", "1", "Root mean square."), StatisticSpec("norm", "1", "Norm."))
    wide = StatisticSpec("quantiles", "1", "Quantiles.", ("quantile",), {"quantile": (0.1, 0.5)})
    groups = (GroupSpec("gradients", (*plain, wide), sites), GroupSpec("outputs", plain[:1], sites[:2]))
    info = RunInfo("a run", "id", "2026-01-02T03:04:05+00:00", "Net", 10, config={"lr": 0.1})
    return RunLayout(info, groups, ("loss",))


def row_of(layout, step):
    size = len(layout.groups[0].sites)
    rms = np.arange(size) + 10.0 * step
    rms[0] = np.inf if step == 2 else rms[0]
    rms[1] = np.nan
    values = {"gradients": {"rms": rms, "norm": -rms, "quantiles": np.stack([rms, 2 * rms], axis=1)}}
    seen = np.ones(size, bool)
    if step == 1:
        seen[2], rms[2] = False, np.nan
    if step % 2 == 0:
        values["outputs"] = {"rms": rms[:2] + 0.5}
    return Row(step, 0.5 * step, values, {"loss": 1.0 / (step + 1)}, {"gradients": seen})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    layout = layout_of()
    writer = RunWriter(tmp_path_factory.mktemp("run") / "keel.h5", layout)
    for step in range(5):
        writer.append(row_of(layout, step))
    writer.close()
    with open_run(writer.path) as opened:
        yield opened


def truth(run, keys=None):
    """Every observed number of a run, by step, group, statistic, site and part."""
    found = {}
    for key in keys or run.keys():
        series, (group, name) = run[key], key.split("/")
        seen = run.observed(group) if series.sites else np.ones((len(series.steps), 1), bool)
        values = series.values.reshape(*seen.shape, -1)
        parts = [f"quantile={value:g}" for value in (0.1, 0.5)] if series.dims else [""]
        for row, column in np.argwhere(seen):
            site = series.sites[column].path if series.sites else ""
            for part, value in zip(parts, values[row, column], strict=True):
                found[int(series.steps[row]), group, name, site, part] = float(value)
    return found


def same(found, expected):
    assert found.keys() == expected.keys()
    np.testing.assert_array_equal([found[key] for key in expected], list(expected.values()))


def test_csv(run, tmp_path):
    written = export_run(run, "csv", tmp_path / "a.csv")
    with written.path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    labels = {"'=block": "=block"}  # a spreadsheet would calculate it
    names = ("group", "statistic", "site", "part")
    found = {
        (int(row["step"]), *(labels.get(row[name], row[name]) for name in names)): float(row["value"]) for row in rows
    }
    same(found, truth(run))
    assert written.numbers == len(rows) == len(truth(run))


def test_parquet(run, tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.read_parquet(export_run(run, "parquet", tmp_path / "a.parquet").path)
    found = {tuple(row[:5]): row[5] for row in frame.itertuples(index=False)}
    same(found, truth(run))


def test_frames(run):
    pytest.importorskip("pandas")
    frame = run.to_frame()
    same({tuple(row[:5]): row[5] for row in frame.itertuples(index=False)}, truth(run))
    assert frame["site"].dtype == "category"
    some = run.to_frame("gradients/rms")
    assert set(some["statistic"]) == {"rms"}
    series = run["gradients/rms"].to_frame()
    np.testing.assert_array_equal(series.loc[3], run["gradients/rms"].at(3))
    assert MemoryWriter(layout_of()).run().to_frame().empty
    with pytest.raises(UnknownNameError, match="select one entry"):
        run["gradients/quantiles"].to_frame()


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_wide_tables_have_a_column_per_series_and_site(run, tmp_path, form):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = export_run(run, form, tmp_path / f"a.{form}", wide=True).path
    frame = pandas.read_csv(path) if form == "csv" else pandas.read_parquet(path)
    assert frame["step"].tolist() == [0, 1, 2, 3, 4]
    rms = run["gradients/rms"].values
    assert frame["gradients/rms/block.0"].tolist() == rms[:, 0].tolist()
    assert frame["gradients/rms/=block"].isna().tolist() == [False, True, False, False, False]
    assert frame["outputs/rms/block.0"].isna().tolist() == [False, True, False, True, False]
    assert frame["gradients/quantiles/block.0/quantile=0.5"].tolist() == (2 * rms[:, 0]).tolist()
    assert frame["scalars/loss"].tolist() == run["scalars/loss"].values.tolist()


def test_json(run, tmp_path):
    def strict(text):
        raise AssertionError(text)

    text = export_run(run, "json", tmp_path / "a.json").path.read_text()
    found = json.loads(text, parse_constant=strict)
    assert found["run"]["title"] == "a run"
    series = {one["name"]: one for one in found["series"]}
    assert list(series) == run.keys()
    rms = series["gradients/rms"]
    assert (rms["sites"], rms["steps"]) == (list(NAMES), [0, 1, 2, 3, 4])
    assert rms["values"][2] == ["inf", None, 22.0, 23.0]
    assert series["gradients/quantiles"]["axes"] == {"quantile": [0.1, 0.5]}
    assert np.array(series["gradients/quantiles"]["values"], dtype=object).shape == (5, 4, 2)


def test_netcdf(run, tmp_path):
    xarray = pytest.importorskip("xarray")
    path = export_run(run, "netcdf", tmp_path / "a.nc", Selection(("gradients",), "block*", slice(1, 4))).path
    with xarray.open_datatree(path, engine="netcdf4") as tree:
        data = tree["gradients"].to_dataset()
        assert data["step"].values.tolist() == [1, 2, 3]
        assert data["site"].values.tolist() == ["block.0", "block,1", 'block "3"']
        np.testing.assert_array_equal(data["rms"].values, run["gradients/rms"].values[1:4][:, [0, 1, 3]])
        assert data["rms"].attrs["units"] == "1"
        assert list(tree.children) == ["gradients"]


def read_events(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(one.step, one.value, one.wall_time) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard(run, tmp_path):
    pytest.importorskip("tensorboard")
    found = read_events(export_run(run, "tensorboard", tmp_path / "tb").path)
    assert set(found) == {
        *(f"gradients/{name}/{site}" for name in ("rms", "norm") for site in (*NAMES[:1], *NAMES[2:])),
        "outputs/rms/block.0",
        "scalars/loss",
    }
    start = 1767323045.0
    assert [(step, value) for step, value, _ in found["gradients/rms/block.0"]] == [
        (0, 0.0), (1, 10.0), (2, np.inf), (3, 30.0), (4, 40.0)
    ]  # fmt: skip
    assert [time for *_, time in found["scalars/loss"]] == [start, start + 0.5, start + 1, start + 1.5, start + 2]
    assert [step for step, *_ in found["gradients/rms/=block"]] == [0, 2, 3, 4]


def test_a_deep_model_is_summarised(tmp_path):
    pytest.importorskip("tensorboard")
    layout = layout_of([f"blocks.{number}" for number in range(100)])
    writer = MemoryWriter(layout)
    for step in range(3):
        writer.append(row_of(layout, step))
    found = read_events(export_run(writer.run(), "tensorboard", tmp_path / "tb").path)
    rms = writer.run()["gradients/rms"].values
    assert {tag.rpartition("/")[2] for tag in found if tag.startswith("gradients/rms/")} == {
        "first", "last", "median", "min", "max"
    }  # fmt: skip
    for name, expected in (("last", rms[:, -1]), ("median", np.nanmedian(rms, 1)), ("max", np.nanmax(rms, 1))):
        assert [value for _, value, _ in found[f"gradients/rms/{name}"]] == expected.tolist()
    narrowed = read_events(export_run(writer.run(), "tensorboard", tmp_path / "b", Selection(sites="blocks.1*")).path)
    assert "gradients/rms/blocks.10" in narrowed
    assert "gradients/rms/median" not in narrowed


def history_of(path):
    """The logged steps in a file of W&B: a log in the format of LevelDB, of protocol buffers."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, place, pending, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", content, place)
        pending += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in {1, 4}:
            record = records.Record.FromString(pending)
            pending = b""
            if record.WhichOneof("record_type") == "history":
                found.append({i.key or "/".join(i.nested_key): i.value_json for i in record.history.item})
    return found


def test_wandb_offline(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of its own imports
        path = export_run(run, "wandb", tmp_path / "wb").path
    (file,) = path.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 20
    while len(history := history_of(file)) < 5 and time.monotonic() < end:
        time.sleep(0.1)  # its own process writes the file
    assert [json.loads(row["scalars/loss"]) for row in history] == run["scalars/loss"].values.tolist()
    assert [json.loads(row["_step"]) for row in history] == [0, 1, 2, 3, 4]
    assert json.loads(history[3]["gradients/rms/block.0"]) == 30.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", slice(None)), ("3", slice(3, 4)), ("3:9", slice(3, 9)), (":9", slice(None, 9)), ("1:9:2", slice(1, 9, 2))],
)
def test_steps_on_the_command_line(text, expected):
    assert parsed_steps(text) == expected


@pytest.mark.parametrize("text", ["a", "-1", "1:2:3:4", "::0", "1.5"])
def test_steps_that_are_none(text):
    with pytest.raises(UsageError, match="is not FIRST:BEFORE"):
        parsed_steps(text)


@pytest.mark.parametrize("form", ["csv", "json", "netcdf", "tensorboard"])
def test_a_selection_is_the_same_in_every_format(run, tmp_path, form):
    if form == "tensorboard":
        pytest.importorskip("tensorboard")
    chosen = Selection(("gradients/rms",), "block*", slice(0, 4, 2))
    written = export_run(run, form, tmp_path / "out", chosen)
    unseen = 2 if form == "tensorboard" else 0  # NaN is no point of a curve
    assert written.numbers == 2 * 3 - unseen


def test_what_cannot_be_exported(run, tmp_path, monkeypatch):
    with pytest.raises(UnknownNameError, match="there is no format 'xls'; formats are csv, parquet"):
        export_run(run, "xls", tmp_path / "a")
    with pytest.raises(UnknownNameError, match="no series matches 'x'; groups are gradients, outputs, scalars"):
        export_run(run, "csv", tmp_path / "a", Selection(("x",)))
    with pytest.raises(UnknownNameError, match=r"no site matches 'head'; sites are 'block\.0'"):
        export_run(run, "csv", tmp_path / "a", Selection(sites="head"))
    with pytest.raises(UsageError, match="json has no wide form"):
        export_run(run, "json", tmp_path / "a", wide=True)
    (tmp_path / "there.csv").write_text("mine")
    with pytest.raises(UsageError, match="exists and is left as it is"):
        export_run(run, "csv", tmp_path / "there.csv")
    assert (tmp_path / "there.csv").read_text() == "mine"
    for form, library in (
        ("parquet", "pyarrow"),
        ("netcdf", "xarray"),
        ("tensorboard", "tensorboard"),
        ("wandb", "wandb"),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(
            UsageError, match=rf"{library} (is not installed; pip install 'keelscope\[|does not import)"
        ):
            export_run(run, form, tmp_path / f"b-{form}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.csv"]


def test_an_export_that_breaks_leaves_nothing(run, tmp_path, monkeypatch):
    def break_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(FORMATS, "csv", replace(FORMATS["csv"], write=break_off))
    with pytest.raises(KeyboardInterrupt):
        export_run(run, "csv", tmp_path / "a.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_rows(tmp_path):
    run = MemoryWriter(layout_of()).run()
    for form in ("csv", "json", "netcdf"):
        assert export_run(run, form, tmp_path / f"a.{form}").numbers == 0
