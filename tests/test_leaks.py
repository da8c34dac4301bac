"""A watched training holds as much at its end as after its first steps: tensors, file handles, memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import keelscope as ks
from keelscope.models import build
from keelscope.store.pace import Pace

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the handles of the process in /proc")


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks), torch.randn(8, 16)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return build("pre_ln", depth=4, width=16, heads=2, vocabulary=32), torch.randint(0, 32, (2, 8))


def held() -> dict[str, int]:
    """What the process has: live tensors, open handles, resident memory in KiB."""
    gc.collect()
    tensors = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tensors": tensors,
        "handles": len(list(Path("/proc/self/fd").iterdir())),
        "memory": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def train(made: tuple[nn.Module, torch.Tensor], path: Path | None, steps: int, looks: int, **options) -> list[dict]:
    """What is held after each of several equal parts of a training."""
    model, x = made
    in_step = options.pop("in_step", False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    with ks.watch(model, path, optimizer=optimizer, **options) if path else nullcontext() as watch:
        for step in range(steps):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.log(loss=loss)
            del loss
            if (step + 1) % (steps // looks) == 0:
                if in_step:  # with the thread that writes
                    watch._journal._writer.flush()
                found.append(held())
    return found


@linux
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (perceptron, {"every": 1, "pace": Pace(part_rows=70)}),
        (perceptron, {"every": 5}),
        (transformer, {"every": 10, "probes": ["default", "sublayers", "updates", "tokens", "attention"]}),
    ],
    ids=["every step, five parts", "every fifth step", "all kinds of probes"],
)
def test_300_steps_keep_no_tensor_and_no_handle(tmp_path, make, options):
    looks = train(make(), tmp_path / "run.h5", 300, 6, in_step=True, **options)[1:]
    assert {look["tensors"] for look in looks} == {looks[0]["tensors"]}
    assert {look["handles"] for look in looks} == {looks[0]["handles"]}


@pytest.mark.slow
@linux
def test_10_000_steps_leak_nothing(tmp_path):
    """In processes of their own, watched and not. Memory may grow by half a KiB per step more than without a watch.

    A tensor that is kept of each step would be that much, and a row many times as much. What a closed part of 4096 rows
    needs once while it is checked is not given back to the system: some 2 MiB.
    """
    looks = {}
    for path in (None, tmp_path / "run.h5"):
        command = [sys.executable, __file__, str(path or "")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
        looks["watched" if path else "plain"] = json.loads(done.stdout)
    sys.stderr.write(json.dumps(looks))
    for of_one in looks.values():
        for what in ("tensors", "handles"):
            assert {look[what] for look in of_one[1:]} == {of_one[1][what]}
    grown = {how: of_one[-1]["memory"] - of_one[1]["memory"] for how, of_one in looks.items()}
    assert grown["watched"] <= max(grown["plain"], 0) + 4000
    with ks.open_run(tmp_path / "run.h5") as run:
        assert len(run.steps) == 10_000


if __name__ == "__main__":
    sys.stdout.write(json.dumps(train(perceptron(), Path(sys.argv[1]) if sys.argv[1] else None, 10_000, 10)))
