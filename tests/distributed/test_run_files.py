"""Run files of several ranks, read as one run: what is complete, what is missing, and what the reader is told."""

from __future__ import annotations

import re
import runpy
import socket
from pathlib import Path

import h5py
import numpy as np
import pytest

import keelscope as ks

JOBS = runpy.run_path(str(Path(__file__).parent / "jobs.py"), run_name="jobs")


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_the_ranks_files_are_one_run(on_ranks, tmp_path, how):
    results = on_ranks(2, "to_file", str(tmp_path / "keel.h5"), how)
    run = ks.open_run(tmp_path / "keel.h5")
    norms = run["parameter_gradients/norm"]
    truth = np.array([[step[site.path] for site in norms.sites] for step in results[0]["truth"]])
    assert norms.values == pytest.approx(truth, rel=1e-5)
    assert run["scalars/grad_norm_total"].values == pytest.approx(np.sqrt((truth**2).sum(1)), rel=1e-5)
    assert run.notes == ()
    assert run.info.model_class == "Net"
    assert run.info.n_parameters == sum(site.numel for site in norms.sites)
    assert "p. grad" in str(ks.report(run))


def test_shards_of_which_one_is_missing_are_not_shown_as_the_whole(on_ranks, tmp_path):
    on_ranks(2, "first_to_file", str(tmp_path / "keel.h5"), "fsdp")
    run = ks.open_run(tmp_path / "keel.h5")
    assert np.isnan(run["parameter_gradients/norm"].values).all()
    assert np.isnan(run["scalars/grad_norm_total"].values).all()
    assert np.isfinite(run["gradients/norm"].values).all()
    text = " ".join(str(ks.report(run)).split())  # lines are as wide as the terminal
    assert "Rank 1 recorded nothing on 3 steps (0 to 2)" in text
    assert "p. grad" not in text
    assert "Weights and their gradients are left out: the ranks that are missing recorded them" in text
    assert "Weights were measured" not in text


def test_a_shard_in_memory_says_that_it_is_one(on_ranks):
    note = on_ranks(2, "fsdp")[1]["notes"][0]
    assert note.startswith("Kept in the memory of rank 1 of 2")
    assert "shards" in note
    assert JOBS["single"](steps=1)["notes"] == ()


def test_a_killed_rank(on_ranks, tmp_path):
    assert on_ranks(4, "killed", str(tmp_path / "keel.h5"), 4, 9) == ["done"] * 3 + [None]
    with h5py.File(tmp_path / "keel.h5") as file:
        assert file["ranks/present"][:].tolist() == [[1] * 9] * 3 + [[1] * 4 + [0] * 5]
    run = ks.open_run(tmp_path / "keel.h5")
    assert run.steps.tolist() == list(range(9))
    for name in ("parameter_gradients/norm", "gradients/norm"):
        assert np.isfinite(run[name].values).all()
    assert "Rank 3 recorded nothing on 5 steps (4 to 8)" in " ".join(run.notes)
    assert "Rank 3 recorded nothing on 5 steps" in str(ks.report(run))


def test_stages_of_a_pipeline_are_one_depth(on_ranks, tmp_path):
    on_ranks(2, "staged", str(tmp_path / "keel.h5"))
    run = ks.open_run(tmp_path / "keel.h5")
    alone = JOBS["train"](JOBS["fresh"](depth=6), probes=JOBS["PROBES"])["run"]
    assert [(stack.length, stack.sublayers) for stack in run.info.stacks] == [(6, 1)]
    assert len(run.info.sublayers) == 6
    positions = {site.path: site.position for site in run.groups["outputs"].sites if site.role == "layer"}
    assert positions == {f"blocks.{i}": i for i in range(6)}
    for name in ("parameter_gradients/norm", "gradients/rms", "outputs/variance", "norms/jacobian_gain_quantile"):
        group = name.partition("/")[0]
        there = [alone[name]["sites"].index(site.path) for site in run.groups[group].sites]
        assert run[name].values == pytest.approx(alone[name]["values"][:, there], rel=1e-5, abs=1e-9, nan_ok=True)
    assert np.isfinite(run["scalars/loss"].values).all(), "only the last stage knows the loss"
    assert run["scalars/grad_norm_total"].values[0] == pytest.approx(
        np.sqrt((alone["parameter_gradients/norm"]["values"][0] ** 2).sum()), rel=1e-5
    )
    assert ks.report(run).axis.length == 6


def test_the_example_of_the_page(on_ranks, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "several-gpus.md").read_text(encoding="utf-8")
    title, code = re.search(r'^```python title="([^"]+)"\n(.*?)^```$', page, re.MULTILINE | re.DOTALL).groups()
    (tmp_path / title).write_text(code)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    on_ranks(2, "from_page", str(tmp_path / title), port)
    run = ks.open_run(tmp_path / "runs" / "sharded.h5")
    assert run.notes == ()
    assert len(run.steps) == 10
    for key in ("parameter_gradients/norm", "scalars/loss", "scalars/grad_norm_total"):
        assert np.isfinite(run[key].values).all()
    assert ks.report(run).axis.length == 8
