from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keelscope.store import overview, overviewfile, sealedfile
from keelscope.store.overview import reduced
from keelscope.store.reader import open_run
from keelscope.store.sealing import seal

VALUES = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, -2.5, 1e300, math.nan, math.inf]), st.booleans()), min_size=0, max_size=12
)


@given(VALUES, st.integers(1, 5))
def test_bins_are_what_a_loop_makes_of_their_rows(cells, factor):
    values = np.array([value for value, _ in cells]).reshape(-1, 1)
    seen = np.array([is_seen for _, is_seen in cells], bool).reshape(-1, 1)
    found = reduced(np.arange(len(cells)), values, seen, factor)
    assert found.first.tolist() == list(range(0, len(cells), factor))
    for place, start in enumerate(found.first):
        own = cells[start : start + factor]
        held = [value for value, is_seen in own if is_seen]
        numbers = [value for value in held if not math.isnan(value)]
        assert found.last[place] == start + len(own) - 1
        assert found.observed[place, 0] == bool(held)
        assert same(found.low[place, 0], min(numbers, default=math.nan))
        assert same(found.high[place, 0], max(numbers, default=math.nan))
        assert same(found.mean[place, 0], math.nan if not held or len(numbers) < len(held) else sum(held) / len(held))


def same(left, right):
    return (math.isnan(left) and math.isnan(right)) or math.isclose(left, right, rel_tol=1e-12)


@pytest.fixture
def long(tmp_path, make_layout, make_row, write_part, monkeypatch):
    """A sealed run that counts as long."""
    for module in (overview, sealedfile):
        monkeypatch.setattr(module, "LONG_RUN", 100)
    layout = make_layout()
    path = write_part(tmp_path / "keel.h5", layout, [make_row(layout, step) for step in range(300)])
    with open_run(path) as run:
        made = {key: run.overview(key, 16) for key in ("gradients/norm", "gradients/quantiles")}
        assert run.stored_overview("gradients/norm", 16) is None
    seal(path)
    return path, made


@pytest.mark.parametrize("key", ["gradients/norm", "gradients/quantiles"])
@pytest.mark.parametrize("isolated", [False, True])
def test_a_sealed_long_run_holds_its_overviews(long, key, isolated):
    path, made = long
    with open_run(path, isolated=isolated) as run:
        found = run.stored_overview(key, 16, sites=slice(1, 4))
        assert run.stored_overview(key, 17) is None
        assert run.stored_overview("parameters/norm", 256) is not None
    expected = made[key]
    assert found.first.tolist() == expected.first.tolist() == list(range(0, 300, 16))
    assert found.last.tolist() == expected.last.tolist()
    assert found.observed.all()
    for name in ("mean", "low", "high"):
        assert np.allclose(getattr(found, name), getattr(expected, name)[:, 1:4], rtol=2.0**-17, atol=0)


def test_overviews_are_labelled_arrays(long):
    xarray = pytest.importorskip("xarray")
    for engine in ("h5netcdf", "netcdf4"):
        with xarray.open_dataset(long[0], engine=engine, group="overview_16/gradients") as data:
            assert data["quantiles_max"].dims == ("step", "site", "quantile")
            assert data["norm_mean"].sel(step=32, site="blocks.3").size == 1


def test_a_damaged_overview_is_said(long, monkeypatch):
    from keelscope.errors import NotARunFileError

    def broken(*_):
        raise ValueError("a chunk does not unpack")

    monkeypatch.setattr(overviewfile, "read_block", broken)
    with open_run(long[0]) as run, pytest.raises(NotARunFileError, match="a chunk does not unpack"):
        run.overview("gradients/norm", 16)
