from __future__ import annotations

import pytest

from keelscope.store import launch
from keelscope.store.launch import session_id

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def _no_runs_yet(monkeypatch):
    monkeypatch.setattr(launch, "_opened", {})


def as_rank(environment, run="keel.h5", runs=1):
    """What one rank derives for each run that its script records under a name."""
    launch._opened.clear()
    return [session_id(run, 2, environment) for _ in range(runs)]


def test_ranks_agree_and_launches_and_runs_differ():
    job = TORCHRUN | {"TORCHELASTIC_RUN_ID": "a1"}
    assert as_rank(job | {"RANK": "0"}, runs=3) == as_rank(job | {"RANK": "1"}, runs=3)
    assert len(set(as_rank(job, runs=3))) == 3
    for other in ({"TORCHELASTIC_RUN_ID": "b2"}, {"MASTER_PORT": "1"}, {"TORCHELASTIC_RESTART_COUNT": "1"}):
        assert as_rank(job | other) != as_rank(job)
    assert as_rank(job, "other.h5") != as_rank(job)


@pytest.mark.parametrize(
    ("environment", "counts"),
    [
        ({}, True),
        (TORCHRUN, False),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, True),
        (TORCHRUN | {"MASTER_ADDR": "localhost"}, True),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "1"}, False),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a1"}, False),
        ({"SLURM_JOB_ID": "7", "MASTER_ADDR": "localhost"}, False),
    ],
)
def test_the_parent_counts_only_where_it_is_shared_and_needed(environment, counts, monkeypatch):
    before = as_rank(environment)
    monkeypatch.setattr(launch, "identity", lambda pid: (pid + 1, 0))
    assert (as_rank(environment) != before) == counts


def test_a_process_alone_shares_with_nobody():
    assert session_id("keel.h5", 1, TORCHRUN) != session_id("keel.h5", 1, TORCHRUN)
