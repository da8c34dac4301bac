"""Models inside DDP and FSDP2: the same numbers as outside, and training as without a watch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import keelscope as ks
from keelscope.models import build

TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))
NAMES = ("input_gradient", "branch_part", "shortcut_part", "shortcut_only_gradient", "branch_gain")


@pytest.fixture(autouse=True)
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def wrapped(how, scheme):
    model = build(scheme, depth=6, width=16, heads=2, vocabulary=64, dropout=0.1)
    if how == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for sublayer in model.sublayers:
            fully_shard(sublayer)
        fully_shard(model)
    return model


def train(how, scheme, *, watched):
    model = wrapped(how, scheme)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch = ks.watch(model, optimizer=optimizer, probes=["default", "sublayers"]) if watched else None
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten().roll(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if watch is None:
        return losses, None
    watch.close()
    return losses, watch.run


@pytest.mark.parametrize("scheme", ["post_ln", "pre_ln", "keel"])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_same_numbers_and_same_training(how, scheme):
    """A sharded norm's weights are freed between forward and backward: they may be used only once gathered again."""
    alone, _ = train(how, scheme, watched=False)
    losses, run = train(how, scheme, watched=True)
    _, plain = train("", scheme, watched=True)
    assert all(torch.equal(a, b) for a, b in zip(alone, losses, strict=True))
    for name in NAMES:
        values, expected = (r[f"sublayers/{name}"].values[0] for r in (run, plain))
        assert np.isfinite(values).all()
        assert values == pytest.approx(expected, rel=1e-6)
