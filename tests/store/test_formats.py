"""A file of every format there ever was opens and reads right; `fixtures/make.py` wrote each with its own version."""

from __future__ import annotations

import gzip
from pathlib import Path

import h5py
import numpy as np
import pytest

from keelscope.store.reader import open_run
from keelscope.store.schema import SCHEMA_VERSION, PartInfo, Site, Stack

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = sorted(path.name.removeprefix("format-").removesuffix(".h5.gz") for path in FIXTURES.glob("*.gz"))


def test_every_format_has_its_file():
    newest = int(SCHEMA_VERSION.partition(".")[2])
    assert set(VERSIONS) >= {f"1.{minor}" for minor in range(newest + 1)}


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def path(version, tmp_path):
    target = tmp_path / "run.h5"
    target.write_bytes(gzip.decompress((FIXTURES / f"format-{version}.h5.gz").read_bytes()))
    return target


@pytest.mark.parametrize("isolated", [False, True])
def test_numbers(path, isolated):
    with open_run(path, isolated=isolated) as run:
        steps = np.arange(0, 12, 2)
        value = steps[:, None] + np.arange(3.0)
        assert run.steps.tolist() == steps.tolist()
        np.testing.assert_array_equal(run["gradients/rms"].values, value)
        np.testing.assert_array_equal(run["gradients/quantiles"].values, np.stack([value / 2, value * 2], axis=2))
        assert run.groups["gradients"].statistics[1].coords == {"quantile": (0.1, 0.5)}
        assert run["outputs/rms"].steps.tolist() == [0, 4, 8]
        np.testing.assert_array_equal(run["outputs/rms"].values, [[np.nan, 0.0], [np.nan, 4.0], [np.nan, 8.0]])
        assert run.observed("outputs").tolist() == [[False, True]] * 3
        np.testing.assert_array_equal(run["scalars/loss"].values, 1.0 / (steps + 1))
        np.testing.assert_array_equal(run["scalars/wall_time"].values, steps / 4)
        assert np.isnan(run["scalars/val/loss"].values).all()


def test_everything_else(path, version):
    with h5py.File(path) as file:
        assert file.attrs["keelscope_schema"] == version
    with open_run(path) as run:
        info = run.info
        assert (info.title, info.model_class, info.n_parameters, info.seed) == ("fixture", "Net", 36, 7)
        assert info.stacks == (Stack("blocks", "Block", 3, 1, main=True),)
        (sublayer,) = info.sublayers
        assert (sublayer.form, sublayer.schemes, sublayer.site) == ("x + F(x)", ("pre_ln",), "blocks.0")
        assert (sublayer.branch, sublayer.alpha, sublayer.beta) == ("blocks.0.f", 1.0, None)
        assert (sublayer.gates, sublayer.stream) == ((), 0)
        assert info.config == {"lr": 0.1, "depth": [1, 2]}
        assert run.groups["outputs"].sites == (
            Site("blocks.0", "Block", "layer", "blocks", 0, 12),
            Site("blocks.1", "Block", "layer", "blocks", 1, 12),
        )
        assert run.groups["gradients"].provenance == {"clip": "before"}
        assert run.groups["gradients"].probe_version == 3
        assert [(entry.path, entry.status) for entry in run.coverage] == [("head.weight", "frozen")]
        part = run._source.layout.part
        assert (part.rank, part.world_size, part.part, part.resumed_at_step) == (0, 1, 0, PartInfo().resumed_at_step)
