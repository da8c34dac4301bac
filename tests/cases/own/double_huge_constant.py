"""A float64 model whose gradient is the same huge number everywhere.

Source: wandb/wandb#2930
Gist: a histogram of one distinct value above 1e15 cannot be drawn: min - 1 equals min in floating point, and logging
    raises out of the training loop.
Expectation: nothing raises; norms of 1e16 and more are recorded as they are.
"""

import torch
from reference import double, modules, params, total
from torch import nn

KIND = "dtype"
SOURCE = "wandb/wandb#2930"


def build():
    torch.manual_seed(313)
    model, x = nn.Linear(4, 2, bias=False).double(), torch.full((3, 4), 1e16, dtype=torch.float64)

    def step(m):
        m.zero_grad()
        loss = m(x).sum()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    y = torch.full((3, 4), 1e16, dtype=torch.float64) @ w["weight"].T
    return {"params": params(y.sum(), w), "modules": modules(y.sum(), {"": y}), "total_grad_norm": total(y.sum(), w)}


EXPECT = {
    "dtypes": {"": "float64"},
    "behaviour": {"must_not_raise": True, "json_valid": "no bare NaN/Infinity"},
    "params": {"weight": {"grad_norm": 8.48528137e16}},
    "modules": {"": {"calls": 1, "act_var": [2.16546963e31], "out_grad_norms": [2.44948974]}},
    "total_grad_norm": 8.48528137e16,
}
