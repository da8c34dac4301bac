"""Finished, live and killed runs are read by tools that know nothing of keelscope, as docs/file-format.md says."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import h5py
import numpy as np
import pytest

from keelscope.store import sealedfile
from keelscope.store.memory import MemoryWriter
from keelscope.store.parts import part_path
from keelscope.store.reader import open_run
from keelscope.store.schema import PartInfo
from keelscope.store.sealing import Outcome, seal
from keelscope.store.writer import RunWriter


@pytest.fixture(params=["closed", "sealed"])
def path(request, tmp_path, layout, make_row):
    writer = RunWriter(tmp_path / "keel.h5", layout)
    for step in range(30):
        writer.append(make_row(layout, step))
    writer.close()
    if request.param == "sealed":
        seal(writer.path)
    return writer.path


@pytest.fixture
def ranks(tmp_path, layout, make_row, write_part, monkeypatch):
    """A sealed run of two ranks that counts as long."""
    monkeypatch.setattr(sealedfile, "LONG_RUN", 20)
    for rank, rows in ((0, 30), (1, 25)):
        own = replace(layout, part=PartInfo(rank, 2))
        write_part(part_path(tmp_path / "keel.h5", rank, 0), own, [make_row(layout, step) for step in range(rows)])
    assert seal(tmp_path / "keel.h5").outcome is Outcome.SEALED
    return tmp_path / "keel.h5"


@pytest.mark.parametrize("engine", ["h5netcdf", "netCDF4"])
def test_a_sealed_run_of_several_ranks_is_labelled_throughout(ranks, make_row, layout, engine):
    with open_dataset(ranks, engine, group="by_rank/gradients") as data:
        assert data["norm"].dims == ("rank", "step", "site")
        assert data["quantiles"].dims == ("rank", "step", "site", "quantile")
        one = data["norm"].sel(rank=1, step=7, site="blocks.3")
        assert one.item() == make_row(layout, 7).values["gradients"]["norm"][3]
        assert data["norm"].sel(rank=1, step=29).isnull().all()
    with open_dataset(ranks, engine, group="ranks") as data:
        assert data["present"].sel(rank=1).values.tolist() == [1] * 25 + [0] * 5
    with open_dataset(ranks, engine, group="overview_16/gradients") as data:
        assert data["rms_max"].dims == ("step", "site")
        assert data["rms_max"].attrs["units"] == "1"
    with open_dataset(ranks, engine, group="sessions") as data:
        assert data["rows"].values.tolist() == [30]


def test_every_axis_and_number_of_a_sealed_run_of_ranks_has_a_name_and_a_unit(ranks):
    test_every_axis_of_every_dataset_is_an_attached_scale(ranks)
    test_every_dataset_has_a_long_name_and_every_number_a_unit(ranks)


def test_a_sealed_run_opens_with_h5py_alone(ranks):
    with h5py.File(ranks) as file:
        assert file.attrs["keelscope_kind"] == "run"
        assert file["gradients/norm"][:].shape == (30, 6)
        assert file["gradients/site"].asstr()[2] == "blocks.2"


def open_dataset(path, engine, **options):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip(engine)
    return xarray.open_dataset(path, engine={"netCDF4": "netcdf4"}.get(engine, engine), **options)


@pytest.mark.parametrize("engine", ["h5netcdf", "netCDF4"])
def test_xarray_sees_a_labelled_array(path, layout, make_row, engine):
    with open_dataset(path, engine, group="gradients") as data:
        assert data["norm"].dims == ("step", "site")
        assert data["quantiles"].dims == ("step", "site", "quantile")
        assert data["norm"].sel(step=7, site="blocks.3").item() == make_row(layout, 7).values["gradients"]["norm"][3]
        assert data["quantile"].values.tolist() == [0.1, 0.5, 0.9]
        assert {"kind", "role", "stack", "position", "numel", "aliases"} <= set(data.coords)
        assert data["kind"].values.tolist() == ["Block"] * 6
        assert data["norm"].attrs["long_name"] == "Euclidean norm."
        assert np.issubdtype(data["observed"].dtype, np.integer)
        assert data["norm"].where(data["observed"] == 1).notnull().all()


@pytest.mark.parametrize("engine", ["h5netcdf", "netCDF4"])
@pytest.mark.parametrize("group", ["/", "scalars", "coverage", "parameters"])
def test_every_group_opens(path, engine, group):
    with open_dataset(path, engine, group=group) as data:
        data.load()
        assert data.variables


@pytest.mark.parametrize("engine", ["h5netcdf", "netCDF4"])
def test_the_whole_run_opens_as_a_tree(path, engine):
    xarray = pytest.importorskip("xarray")
    pytest.importorskip(engine)
    with xarray.open_datatree(path, engine={"netCDF4": "netcdf4"}.get(engine, engine)) as tree:
        assert {"gradients", "parameters", "scalars", "coverage"} <= set(tree.children)
        assert tree.attrs["Conventions"] == "CF-1.11"


def test_a_live_run_opens_in_xarray_through_h5netcdf(tmp_path, layout, make_row, python):
    pytest.importorskip("h5netcdf")
    writer = RunWriter(tmp_path / "keel.h5", layout)
    for step in range(20):
        writer.append(make_row(layout, step))
    writer.flush()
    script = """
import sys, warnings
warnings.simplefilter("ignore")
import xarray
options = {"swmr": True, "locking": False}
data = xarray.open_dataset(sys.argv[1], engine="h5netcdf", group="gradients", driver_kwds=options)
print(data["norm"].shape)
"""
    done = python(script, writer.path)
    writer.close()
    assert done.stdout.strip() == "(20, 6)"


def test_every_axis_of_every_dataset_is_an_attached_scale(path):
    bare = []

    def visit(name, item):
        if isinstance(item, h5py.Dataset) and not item.is_scale:
            bare.extend(name for axis in item.dims if len(axis) != 1)

    with h5py.File(path) as file:
        file.visititems(visit)
    assert not bare


def test_every_dataset_has_a_long_name_and_every_number_a_unit(path):
    lacking = []

    def visit(name, item):
        if isinstance(item, h5py.Dataset):
            numeric = item.dtype.kind == "f"
            lacking.extend([name] * ("long_name" not in item.attrs or (numeric and "units" not in item.attrs)))

    with h5py.File(path) as file:
        file.visititems(visit)
        assert np.isnan(file["gradients/norm"].attrs["_FillValue"]).all()
        assert file["gradients/norm"].fillvalue != file["gradients/norm"].fillvalue
    assert not lacking


COMMANDS = pytest.mark.parametrize(
    "command", [["h5dump", "-d", "/gradients/norm"], ["h5dump", "-H"], ["h5ls", "-r"], ["ncdump", "-h"]], ids=" ".join
)


@COMMANDS
def test_command_line_tools_read_it(path, command):
    assert_read(command, path)


@COMMANDS
def test_command_line_tools_read_a_sealed_run_of_ranks(ranks, command):
    assert_read(command, ranks)


def assert_read(command, path):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "norm" in done.stdout


def test_a_killed_run_opens_with_h5dump_after_h5clear(tmp_path, python):
    if shutil.which("h5clear") is None:
        pytest.skip("h5clear is not installed")
    script = """
import os, signal, sys
from conftest import make_layout, make_row
from keelscope.store.writer import RunWriter
layout = make_layout()
writer = RunWriter(sys.argv[1], layout)
for step in range(20):
    writer.append(make_row(layout, step))
writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "keel.h5"
    python(script, path, check=False)
    with h5py.File(path, "r", swmr=True, locking=False) as file:
        assert file["gradients/norm"].shape == (20, 6)
    subprocess.run(["h5clear", "-s", "--increment=0", str(path)], check=True)
    with h5py.File(path) as file:
        assert file["gradients/norm"].shape == (20, 6)
    assert open_run(path).steps.size == 20


def test_to_xarray_gives_the_same_tree_from_file_and_memory(path, layout, make_row):
    xarray = pytest.importorskip("xarray")
    memory = MemoryWriter(layout)
    for step in range(30):
        memory.append(make_row(layout, step))
    with open_run(path) as run:
        tree = run.to_xarray()
    xarray.testing.assert_identical(tree, memory.run().to_xarray())
    assert tree["gradients"]["norm"].sel(step=7, site="blocks.3").item() == (3 / 7.0 + 7000.0)
    assert tree["parameters"]["norm"].sizes == {"step": 15, "site": 2}
    assert tree["gradients"].attrs["clip"] == "before"
    assert tree["scalars"]["loss"].values[3] == 1.0


def test_a_series_becomes_a_frame(path):
    pytest.importorskip("pandas")
    frame = open_run(path)["gradients/norm"].to_frame()
    assert (frame.shape, frame.index.name, list(frame.columns[:2])) == ((30, 6), "step", ["blocks.0", "blocks.1"])
