from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from keelscope.store import writer
from keelscope.store.commit import Committer, State
from keelscope.store.encoding import create_objects
from keelscope.store.pace import Pace
from keelscope.store.rows import RowPacker
from keelscope.store.schema import (
    CoverageEntry,
    GroupSpec,
    Row,
    RunInfo,
    RunLayout,
    Site,
    Stack,
    StatisticSpec,
)

collect_ignore = ["mutations.py"]  # a program of its own, which test_fuzz runs


def make_layout(sites: int | list[str] = 6, scalars: tuple[str, ...] = ("loss", "lr")) -> RunLayout:
    paths = [f"blocks.{index}" for index in range(sites)] if isinstance(sites, int) else sites
    labels = tuple(Site(path, "Block", "layer", "blocks", index, 12) for index, path in enumerate(paths))
    quantiles = StatisticSpec("quantiles", "1", "Quantiles.", ("quantile",), {"quantile": (0.1, 0.5, 0.9)})
    norms = (StatisticSpec("norm", "1", "Euclidean norm."), StatisticSpec("rms", "1", "Root mean square."), quantiles)
    info = RunInfo(
        title="test",
        run_id="0b0e7a2c",
        created_at="2026-01-02T03:04:05+00:00",
        model_class="Net",
        n_parameters=1234,
        device="cpu",
        training_library="torch 2.13.0",
        seed=7,
        stacks=(Stack("blocks", "Block", len(paths), 2, main=True),),
        config={"lr": 0.1, "depth": [1, 2], "scheme": {"name": "keel"}},
    )
    groups = (
        GroupSpec("gradients", norms, labels, "keelscope_probes:gradients", 3, {"scale": "unscaled", "clip": "before"}),
        GroupSpec("parameters", norms[:1], labels[:2], "keelscope_probes:parameters"),
    )
    coverage = (
        CoverageEntry("blocks.0", "module", "observed"),
        CoverageEntry("head.weight", "parameter", "frozen", "It does not require a gradient."),
    )
    return RunLayout(info, groups, scalars, coverage)


def make_small_layout() -> RunLayout:
    """Two groups of two sites and one statistic each: a file of it is made and read in a few milliseconds."""
    layout = make_layout(2, scalars=("loss",))
    groups = tuple(replace(group, statistics=group.statistics[:1]) for group in layout.groups)
    return replace(layout, groups=groups, coverage=())


def make_row(layout: RunLayout, step: int) -> Row:
    """Every value follows from step, group, statistic and place, so that a reader can check each one."""
    values = {}
    for number, group in enumerate(layout.groups):
        if number and step % 2:
            continue
        values[group.name] = {}
        for index, spec in enumerate(group.statistics):
            shape = (len(group.sites), *(len(spec.coords[dim]) for dim in spec.dims))
            place = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
            values[group.name][spec.name] = place / 7.0 + step * 1000.0 + 100.0 * index + 10.0 * number
    return Row(step, 0.25 * step, values, dict.fromkeys(layout.scalars, step / 3.0))


def write_part(path: Path, layout: RunLayout, rows: Iterable[Row], *, dead: bool = False) -> Path:
    """A part file as a writer leaves it: closed, or with the flag of one that was killed."""
    path.parent.mkdir(exist_ok=True)
    packer, made = RowPacker(layout), path.with_name(path.name + ".made")
    with h5py.File(made, "x", libver=("v110", "v110"), rdcc_nbytes=0, track_order=True, locking=False) as file:
        create_objects(file, packer.layout)
        file.flush()
        file.swmr_mode = True
        committer = Committer(file, packer.layout)
        batch = [packer.pack(row) for row in rows]
        if batch:
            committer.commit(batch)
        committer.report(State.LIVE if dead else State.DONE, 0)
        if dead:
            file.flush()
            path.write_bytes(made.read_bytes())
    if not dead:
        path.write_bytes(made.read_bytes())
    made.unlink()
    return path


@pytest.fixture(autouse=True)
def unsealed(request, monkeypatch):
    """Closed files are looked at as their writer left them, except where sealing is what is tested."""
    if "sealing" not in request.fixturenames:
        monkeypatch.setattr(writer, "seal_closed_run", lambda *_: "")


@pytest.fixture
def sealing():
    """Closed runs are sealed, as they are outside these tests."""


@pytest.fixture(scope="session", name="write_part")
def _write_part() -> Callable[..., Path]:
    return write_part


@pytest.fixture(scope="session", name="make_layout")
def _make_layout() -> Callable[..., RunLayout]:
    return make_layout


@pytest.fixture(scope="session", name="make_small_layout")
def _make_small_layout() -> Callable[[], RunLayout]:
    return make_small_layout


@pytest.fixture(scope="session", name="make_row")
def _make_row() -> Callable[[RunLayout, int], Row]:
    return make_row


@pytest.fixture(scope="session")
def quick() -> Pace:
    """A writer that commits and retries soon."""
    return Pace(delay=0.02, retry=0.05, patience=0.2)


@pytest.fixture
def layout() -> RunLayout:
    return make_layout()


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For new interpreters: they see the same packages and this file as `conftest`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}


@pytest.fixture
def python(environment) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a new interpreter that sees the same packages and this file as `conftest`."""

    def run(script: str, *arguments: object, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", script, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            **{"timeout": 120, **options},
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run
