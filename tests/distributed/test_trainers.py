"""Two ranks under each trainer write one run, with the numbers of the loop written by hand in one process."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import keelscope as ks

sys.path.insert(0, str(Path(__file__).parent))
import trainer_jobs as jobs

sys.path.pop(0)
HAND = jobs.module("integrations/conftest.py")
WHOLE = ("gradients/norm", "gradients/rms", "outputs/rms", "parameters/norm", "norms/jacobian_gain")


def check(path: Path, hand) -> None:
    assert min(np.linalg.norm(hand.truth.gradients, axis=1)) > jobs.CLIP, "clipping must have something to clip"
    with ks.open_run(path) as run:
        assert run.notes == ()
        assert not run.live
        hand.truth.check(run)
        for name in WHOLE:
            assert run[name].sites == hand.run[name].sites
            batched = [
                site.path != "transformer.wpe" for site in run[name].sites
            ]  # its output is the same on each rank
            wanted = hand.run[name].values[:, batched]
            np.testing.assert_allclose(run[name].values[:, batched], wanted, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_two_ranks(on_ranks, tmp_path, library):
    if find_spec(library) is None:
        pytest.skip(f"not installed: {library} (make test installs it)")
    ranks = on_ranks(2, f"trainer_jobs:{library}", str(tmp_path / "run.h5"))
    assert [world for world, _ in ranks] == [2, 2]
    module = torch.nn.ModuleDict({"net": jobs.net()}) if library == "lightning" else jobs.net()
    call = (lambda model, x: jobs.loss_of(model["net"], x)) if library == "lightning" else jobs.loss_of
    hand = HAND.by_hand(module, jobs.sgd(module), jobs.batches(), call, accumulate=jobs.ACCUMULATE, clip=jobs.CLIP)
    np.testing.assert_allclose(np.mean([losses for _, losses in ranks], axis=0), hand.truth.losses, rtol=1e-5)
    hand.truth.losses = ranks[0][1]  # a number that is logged is that of the first rank
    check(tmp_path / "run.h5", hand)


def test_two_ranks_under_the_trainer_of_transformers(on_ranks, tmp_path, operators):
    for name in ("transformers", "accelerate"):
        if find_spec(name) is None:
            pytest.skip(f"not installed: {name} (make test installs it)")
    first, second = on_ranks(2, "trainer_jobs:huggingface", str(tmp_path / "run.h5"))
    assert not torch.equal(first[0]["input_ids"], second[0]["input_ids"])
    whole = [{k: torch.cat([a[k], b[k]]) for k in a} for a, b in zip(first, second, strict=True)]
    model = jobs.module("integrations/test_huggingface.py").gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
    options = {"accumulate": jobs.ACCUMULATE, "clip": jobs.CLIP}
    hand = HAND.by_hand(model, optimizer, whole, lambda net, batch: net(**batch).loss, **options)
    check(tmp_path / "run.h5", hand)
