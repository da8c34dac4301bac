"""Half-precision activations of 40000: every entry fits, their sum and their squares do not.

Source: pytorch/pytorch#44350
Gist: mean() and var() in the tensor's own dtype come out as Inf and NaN for finite values, and a tool then reports a
    broken layer.
Expectation: mean, variance and gradient norm are finite and right; nothing is said to be non-finite.
"""

import torch
from reference import variance
from torch import nn

KIND = "dtype"
SOURCE = "pytorch/pytorch#44350"
RTOL = 2e-3


class Spread(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([40000.0, -30000.0, 20000.0, 40000.0]).half())

    def forward(self, x):
        return x * self.scale


def build():
    model, x = nn.Sequential(Spread(), nn.Identity()), torch.ones(64, 4).half()
    weights = (torch.arange(64 * 4).reshape(64, 4) % 7 - 3).half() / 64

    def step(m):
        m.zero_grad()
        loss = (m(x).float() * weights.float()).sum() / 1e6
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    scale = torch.tensor([40000.0, -30000.0, 20000.0, 40000.0]).half().double()
    weights = (torch.arange(64 * 4).reshape(64, 4) % 7 - 3).double() / 64
    y = scale.expand(64, 4)
    gradient = (weights / 1e6).float().half().double()
    call = {
        "calls": 1,
        "act_var": [variance(y)],
        "act_mean": [y.mean()],
        "out_grad_norms": [gradient.norm()],
        "n": [256],
    }
    return {"modules": {"0": call}, "loss": (y * weights).sum() / 1e6}


EXPECT = {
    "dtypes": {"0": "float16"},
    "diagnosis": {"not": ["nonfinite", "overflow_step_skipped"]},
    "modules": {
        "0": {
            "calls": 1,
            "act_var": [818750000.0],
            "act_mean": [17500.0],
            "out_grad_norms": [7.20205663e-07],
            "n": [256],
        }
    },
    "loss": -0.00125,
}
