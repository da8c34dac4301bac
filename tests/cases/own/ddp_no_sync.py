"""Accumulation under DistributedDataParallel: the first micro-batch runs inside no_sync().

Source: modelscope/FunASR#3472
Gist: with the condition off by one the wrong micro-batch is synchronised; loggers add up what the bucket hooks
    deliver, and see one micro-batch or an unsynchronised sum.
Expectation: the gradient of the step is the sum over both micro-batches, under names without "module.".
"""

import tempfile

import torch
import torch.distributed as dist
from reference import double, linear, norms, params
from torch import nn

KIND = "distributed"
SOURCE = "modelscope/FunASR#3472"


def data():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(210))


def build():
    if not dist.is_initialized():
        place = "file://" + tempfile.mkdtemp() + "/store"
        dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    torch.manual_seed(310)
    inner = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    model, halves = nn.parallel.DistributedDataParallel(inner), data().chunk(2)

    def step(m):
        m.zero_grad()
        with m.no_sync():
            first = m(halves[0]).pow(2).mean() / 2
            first.backward()
        second = m(halves[1]).pow(2).mean() / 2
        second.backward()
        return first.item() + second.item()

    return model, step


def oracle():
    w = {name.removeprefix("module."): p for name, p in double(build()[0]).items()}
    firsts, losses = [], []
    for half in data().double().chunk(2):
        firsts.append(linear(half, w, "0"))
        losses.append(linear(torch.tanh(firsts[-1]), w, "2").pow(2).mean() / 2)
    calls = norms(sum(losses), dict(enumerate(firsts)))
    found = {"params": params(sum(losses), w), "modules": {"0": {"calls": 2, "out_grad_norms": [calls[0], calls[1]]}}}
    found["params"]["0.weight"]["per_backward"] = [norms(loss, {"w": w["0.weight"]})["w"] for loss in losses]
    return found | {"loss": sum(losses)}


EXPECT = {
    "names_raw": ["module.0.weight"],
    "names_clean": ["0.weight", "2.bias"],
    "calls_per_step": {"0": 2, "2": 2},
    "backwards_per_step": 2,
    "behaviour": {"must_not_raise": True, "bit_identical_training": True},
    "params": {
        "0.weight": {"grad_norm": 0.433432519, "per_backward": [0.265608051, 0.240859025]},
        "0.bias": {"grad_norm": 0.043863347},
        "2.weight": {"grad_norm": 0.25393815},
        "2.bias": {"grad_norm": 0.0858640601},
    },
    "modules": {"0": {"calls": 2, "out_grad_norms": [0.0819820359, 0.065824685]}},
    "loss": 0.0664653362,
}
