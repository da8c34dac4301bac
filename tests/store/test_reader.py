from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import h5py
import numpy as np
import pytest

from keelscope.errors import KeelscopeError, RunFileError, SeriesNotFoundError, UsageError
from keelscope.store.memory import MemoryWriter
from keelscope.store.reader import open_run
from keelscope.store.schema import SCALARS, SublayerInfo
from keelscope.store.writer import RunWriter


@pytest.fixture(params=["file", "memory", "live file"])
def run(request, tmp_path, layout, make_row):
    """Ten rows, read from each kind of source."""
    writer = MemoryWriter(layout) if request.param == "memory" else RunWriter(tmp_path / "keel.h5", layout)
    for step in range(0, 100, 10):
        writer.append(make_row(layout, step))
    if request.param == "file":
        writer.close()
    writer.flush()
    opened = open_run(writer.path) if request.param == "file" else writer.run()
    yield opened
    opened.close()
    writer.close()


def test_what_is_recorded_is_listed_in_order(run):
    assert run.keys() == [
        "gradients/norm",
        "gradients/rms",
        "gradients/quantiles",
        "parameters/norm",
        "scalars/loss",
        "scalars/lr",
        "scalars/wall_time",
    ]
    assert list(run) == run.keys()
    assert run.scalars == ("loss", "lr", "wall_time")
    assert list(run.groups) == ["gradients", "parameters"]


def test_what_is_known_about_the_run_is_the_layout(run, layout):
    assert run.info == layout.info
    assert run.coverage == layout.coverage
    assert tuple(run.groups.values()) == layout.groups


def test_a_series_has_values_steps_sites_unit_and_doc(run, layout, make_row):
    series = run["gradients/quantiles"]
    assert series.values.tolist() == [
        make_row(layout, s).values["gradients"]["quantiles"].tolist() for s in range(0, 100, 10)
    ]
    assert (series.steps.dtype, series.steps.tolist()) == (np.int64, list(range(0, 100, 10)))
    assert (series.sites, series.unit, series.doc, series.dims) == (
        layout.groups[0].sites,
        "1",
        "Quantiles.",
        ("quantile",),
    )


def test_a_scalar_is_a_series_without_sites(run):
    loss = run["scalars/loss"]
    assert (loss.values.tolist(), loss.sites) == ([step / 3.0 for step in range(0, 100, 10)], ())
    wall_time = run["scalars/wall_time"]
    assert (wall_time.values[1], wall_time.unit) == (2.5, "s")


@pytest.mark.parametrize(
    ("start", "stop"), [(None, None), (2, 5), (0, 0), (5, 2), (-3, None), (None, -8), (8, 100), (200, 300), (-50, 3)]
)
@pytest.mark.parametrize("key", ["gradients/norm", "scalars/loss"])
def test_rows_are_sliced_as_in_a_list(run, key, start, stop):
    whole, part = run[key], run.read(key, start, stop)
    assert part.values.tolist() == whole.values[start:stop].tolist()
    assert part.steps.tolist() == whole.steps[start:stop].tolist()
    assert part.values.shape[1:] == whole.values.shape[1:]


def test_sites_that_were_seen_come_by_group(run):
    assert run.observed("gradients").shape == (10, 6)
    assert run.observed("gradients", -2).all()
    assert run.observed("gradients").dtype == bool


def test_membership_and_get(run):
    assert "gradients/norm" in run
    assert "gradients/nrm" not in run
    assert 3 not in run
    assert run.get("gradients/nrm") is None
    assert run.get("scalars/loss").values.size == 10


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("gradients/nrm", "Did you mean gradients/norm"),
        ("gradient/rms", "Did you mean gradients/rms"),
        ("rms", "Did you mean gradients/rms"),
        ("scalars/los", "Did you mean scalars/loss"),
        ("x", "It holds gradients/norm, gradients/rms"),
        ("", "It holds"),
        ("gradients/observed", "does not hold 'gradients/observed'"),
        ("scalars/step", "does not hold 'scalars/step'"),
        ("gradients/norm/", "Did you mean gradients/norm"),
        ("status", "does not hold 'status'"),
    ],
)
def test_a_series_that_is_not_there_is_named_with_its_neighbours(run, key, hint):
    with pytest.raises(SeriesNotFoundError, match=hint) as caught:
        run[key]
    assert isinstance(caught.value, KeyError)


def test_a_group_that_is_not_there(run):
    with pytest.raises(SeriesNotFoundError, match="Did you mean gradients"):
        run.observed("gradient")


@pytest.mark.parametrize("sites", [slice(1, 2), slice(0, 1), slice(None)])
def test_a_stretch_of_sites_is_read_as_from_the_whole(run, sites):
    for key in ("gradients/rms", "gradients/quantiles"):
        part, whole = run.read(key, 2, 7, sites=sites), run.read(key, 2, 7)
        assert np.array_equal(part.values, whole.values[:, sites], equal_nan=True)
        assert part.sites == whole.sites[sites]
    assert np.array_equal(run.observed("gradients", sites=sites), run.observed("gradients")[:, sites])


def test_values_that_were_read_stay_valid_after_close(run):
    series = run["gradients/norm"]
    before = series.values.copy()
    run.close()
    assert np.array_equal(series.values, before)


def test_changing_what_was_read_does_not_change_the_run(run):
    run["gradients/norm"].values[:] = -1
    run.steps[:] = -1
    assert run["gradients/norm"].values.min() >= 0
    assert run.steps.min() >= 0


def test_text_and_html_show_model_steps_groups_and_coverage(run):
    text, html = repr(run), run._repr_html_()
    for part in (
        "Net, 1,234 parameters, torch 2.13.0",
        "10, 0 to 90",
        "norm rms quantiles  [6 sites]",
        "1 observed, 1 not",
    ):
        assert part in text
        assert part in html
    assert html.count("<table>") == html.count("</table>") == 1
    assert len(text.splitlines()) < 15


def test_reading_after_close_says_what_to_do(tmp_path, layout):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.close()
    with open_run(writer.path) as run:
        pass
    run.close()
    with pytest.raises(UsageError, match="was closed; open it again"):
        run["gradients/norm"]
    assert not run.refresh()
    assert "keel.h5" in repr(run)


def test_too_much_at_once_is_refused(tmp_path, layout, make_row, monkeypatch):
    from keelscope.store import filesource

    writer = RunWriter(tmp_path / "keel.h5", layout)
    writer.append(make_row(layout, 0))
    writer.close()
    monkeypatch.setattr(filesource, "_MAX_READ", 40)
    with pytest.raises(UsageError, match="read fewer rows at a time"):
        open_run(writer.path)["gradients/norm"]


def test_steps_are_those_of_any_group_and_scalars_may_have_more(tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    for step in (3, 4, 9):
        writer.append(make_row(layout, step))
    writer.append(replace(make_row(layout, 11), values={}))
    writer.close()
    run = open_run(writer.path)
    assert run.steps.tolist() == [3, 4, 9]
    assert run["gradients/norm"].steps.tolist() == [3, 4, 9]
    assert run["parameters/norm"].steps.tolist() == [4]
    assert run[f"{SCALARS}/lr"].steps.tolist() == [3, 4, 9, 11]


def test_every_error_of_the_reader_is_a_keelscope_error(tmp_path):
    with pytest.raises(KeelscopeError):
        open_run(tmp_path)
    with pytest.raises(OSError):  # noqa: PT011 - the builtin that a caller without keelscope's errors would catch
        open_run(tmp_path / "gone.h5")


def test_reading_needs_neither_torch_nor_scipy_nor_pandas():
    script = "import sys, keelscope.store.filesource, keelscope.store.writer, keelscope.store.memory\n"
    script += "print([name for name in ('torch', 'scipy', 'pandas', 'xarray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_describing_a_run_needs_no_hdf5():
    script = "import sys, keelscope.store.memory, keelscope.store.reader; print('h5py' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_sublayers_of_format_1_0_still_open(tmp_path, layout):
    sublayer = SublayerInfo("x + b F(x)", ("rezero",), alpha=1.0, beta=0.0, gates=("blocks.0.alpha",), stream=1)
    path = tmp_path / "old.h5"
    info = replace(layout.info, sublayers=(sublayer,))
    RunWriter(path, replace(layout, info=info)).close()
    with open_run(path) as run:
        assert run.info.sublayers == (sublayer,)
    with h5py.File(path, "r+") as file:
        kept = [{k: v for k, v in e.items() if k not in {"beta", "gates", "stream"}} for e in sublayers_in(file)]
        file.attrs.update({"sublayers": json.dumps(kept), "keelscope_schema": "1.0"})
    with open_run(path) as run:
        assert run.info.sublayers == (replace(sublayer, beta=None, gates=(), stream=0),)


def test_a_sublayer_whose_stream_is_no_number_is_refused(tmp_path, layout):
    path = tmp_path / "odd.h5"
    RunWriter(path, replace(layout, info=replace(layout.info, sublayers=(SublayerInfo("x + F(x)"),)))).close()
    with h5py.File(path, "r+") as file:
        odd = json.dumps([sublayers_in(file)[0] | {"stream": float("inf")}])
        file.attrs["sublayers"] = odd
    with pytest.raises(RunFileError, match="sub-layers"):
        open_run(path)


def sublayers_in(file):
    return json.loads(file.attrs["sublayers"])
