"""Several ranks record what one process records; the numbers of each are combined as the run file says they do."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

JOBS = runpy.run_path(str(Path(__file__).parent / "jobs.py"), run_name="jobs")


def combined(how: str, values: np.ndarray) -> np.ndarray:
    """``[rank, step, site]`` to ``[step, site]``, unobserved ranks left out."""
    seen = ~np.isnan(values)
    total = {"max": np.nanmax, "mean": np.nanmean, "rms": lambda v, axis: np.sqrt(np.nanmean(v**2, axis))}
    total |= {"root_sum_squares": lambda v, axis: np.sqrt(np.nansum(v**2, axis)), "": lambda v, axis: v[0]}
    return np.where(seen.any(0), total[how](values, axis=0), np.nan)


def together(results: list, name: str) -> np.ndarray:
    series = [result["run"][name] for result in results]
    assert all(one["sites"] == series[0]["sites"] for one in series)
    return combined(series[0]["across"], np.stack([one["values"] for one in series]))


def assert_true_gradients(results: list, rel: float = 1e-5) -> None:
    sites = results[0]["run"]["parameter_gradients/norm"]["sites"]
    truth = np.array([[step[site] for site in sites] for step in results[0]["truth"]])
    assert together(results, "parameter_gradients/norm") == pytest.approx(truth, rel=rel, abs=0)
    assert [result["warnings"] for result in results] == [[]] * len(results)


@pytest.fixture(scope="module")
def one_process():
    return JOBS["single"]()


EXACT = {
    "outputs": ["mean", "rms", "max_abs", "zero_fraction", "nonfinite_count"],
    "gradients": ["norm", "rms", "max_abs", "zero_fraction", "nonfinite_count", "late_token_level"],
    "parameters": ["norm", "rms"],
    "parameter_gradients": ["norm", "rms"],
    "norms": ["jacobian_gain", "sigma_max", "input_rms", "epsilon_share", "gamma_rms"],
    "sublayers": ["alpha", "shortcut_gain", "input_gradient", "shortcut_part", "branch_part"],
    "tokens": ["cosine_similarity", "effective_rank"],
    "updates": ["norm", "ratio"],
}
ON_SHARDS = {**EXACT, "updates": ["norm"]}


@pytest.mark.filterwarnings("ignore:(Mean of empty slice|All-NaN slice encountered):RuntimeWarning")
@pytest.mark.parametrize(
    ("world", "job", "reduce"), [(2, "ddp", "replica"), (2, "fsdp", "shard"), (4, "fsdp", "shard")]
)
def test_the_ranks_together_are_the_single_process(on_ranks, one_process, world, job, reduce):
    results = on_ranks(world, job)
    for group, names in (ON_SHARDS if reduce == "shard" else EXACT).items():
        for name in names:
            expected = one_process["run"][f"{group}/{name}"]["values"]
            tolerance = {"rel": 1e-5, "abs": 1e-6 if name == "mean" else 1e-9}
            assert together(results, f"{group}/{name}") == pytest.approx(expected, nan_ok=True, **tolerance), name
    assert_true_gradients(results)
    said = [result["run"]["parameter_gradients/norm"]["provenance"]["reduce"] for result in results]
    assert said == [reduce] * world
    assert ("updates/ratio" in results[0]["run"]) is (reduce == "replica"), "a ratio of shards is no ratio of wholes"


def test_whole_parameters_are_recorded_by_the_first_rank_only(on_ranks):
    first, second = on_ranks(2, "ddp")
    for name in ("parameters/norm", "parameter_gradients/rms", "updates/norm"):
        assert np.isfinite(first["run"][name]["values"]).all()
        assert np.isnan(second["run"][name]["values"]).all()
        assert not first["run"][name]["across"]
    assert first["coverage"] == second["coverage"]


def test_an_empty_shard_is_no_gap(on_ranks):
    """Five rows over four ranks are 2, 2, 1 and none; what a rank has nothing of adds 0, and is not unknown."""
    last = on_ranks(4, "fsdp")[3]["run"]["parameter_gradients/norm"]
    norms = dict(zip(last["sites"], last["values"].T, strict=True))
    assert (norms["inp.weight"] == 0).all()
    assert (norms["head.weight"] == 0).all()
    assert (norms["blocks.0.up.weight"] > 0).all()


@pytest.mark.parametrize(
    ("world", "job"), [(4, "hsdp"), (2, "tensor_parallel"), (4, "fsdp_with_tensor_parallel")], ids=str
)
def test_repeated_and_split_parameters_count_once(on_ranks, world, job):
    results = on_ranks(world, job)
    assert_true_gradients(results)
    assert results[0]["run"]["parameters/norm"]["provenance"]["reduce"] == "shard"


def test_outputs_of_split_layers(on_ranks):
    """The columns of `up` lie on two ranks; the sum behind `down` is on both."""
    results = on_ranks(2, "tensor_parallel")
    alone = JOBS["train"](JOBS["fresh"](width=4, hidden=8), probes=JOBS["LITTLE"])
    for name in ("gradients/norm", "gradients/rms"):
        assert together(results, name)[0] == pytest.approx(alone["run"][name]["values"][0], rel=1e-5)


@pytest.mark.parametrize("of", ["ddp", "fsdp"])
def test_gradients_of_the_whole_step_before_clipping(on_ranks, of):
    """Accumulated, in half precision, offloaded, checkpointed: what the optimizer would get if nothing was clipped."""
    ranks = on_ranks(2, "variants", of)
    assert len(ranks[0]) >= 3
    for name in ranks[0]:
        results = [results[name] for results in ranks]
        assert_true_gradients(results)
        clipped = np.linalg.norm(together(results, "parameter_gradients/clipped_norm"), axis=1)
        assert clipped == pytest.approx(np.full(2, 0.01), rel=1e-3)


def test_micro_batches_that_are_not_exchanged_yet_are_no_steps(on_ranks):
    assert_true_gradients(on_ranks(2, "accumulated_without_optimizer"))


@pytest.mark.parametrize(("how", "every"), [("ddp", 1), ("ddp", 10), ("fsdp", 10)])
def test_watching_changes_nothing(on_ranks, how, every):
    for without, watched in on_ranks(2, "unwatched_and_watched", how, every):
        assert len(without["losses"]) == 20
        for key in ("losses", "weights"):
            assert all(torch.equal(a, b) for a, b in zip(without[key], watched[key], strict=True))
        assert watched["run"]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_one_watching_rank_waits_for_nobody(on_ranks, how):
    first, second = on_ranks(2, "only_the_first_watches", how)
    assert first["run"]
    assert not second["run"]
    assert np.isfinite(first["run"]["gradients/norm"]["values"]).all()


@pytest.mark.filterwarnings("error")
def test_gradients_that_are_not_added_up_are_said_and_not_shown(on_ranks):
    first, second = on_ranks(2, "sequence_parallel")
    norms = dict(zip(first["run"]["parameter_gradients/norm"]["sites"],
                     first["run"]["parameter_gradients/norm"]["values"][0], strict=True))  # fmt: skip
    assert np.isnan(norms["norm.weight"])
    assert norms["up.weight"] > 0
    assert first["coverage"]["norm.weight", "parameter"] == "not_observed"
    assert first["coverage"]["up.weight", "parameter"] == "observed"
    assert np.isfinite(first["run"]["norms/jacobian_gain"]["values"]).all(), "rows of the norm lie whole on a rank"
    assert np.isfinite(second["run"]["gradients/late_token_level"]["values"]).all()


def test_sharding_after_watch_is_said(on_ranks):
    for coverage in on_ranks(2, "sharded_after_watching"):
        assert {status for status, _ in coverage.values()} == {"not_observed"}
        assert "after fully_shard()" in coverage["inp.weight"][1]
