"""checkpoint_sequential over blocks with dropout: the masks of the recomputation are those of the forward.

Source: allenai/OLMo-core#828
Gist: recomputing with other random numbers takes gradients with respect to another sample than the loss saw; a tool
    that draws random numbers in between, or counts the recomputed calls, does the same harm or shows twice the calls.
Expectation: one call per block; variance and gradient of the masked forward; random state as without a watch.
"""

import torch
from reference import double, linear, modules, params
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

KIND = "checkpointing"
SOURCE = "allenai/OLMo-core#828"


def data():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(205))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25)) for _ in range(4)))

    def forward(self, x):
        return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)


def build():
    torch.manual_seed(305)
    model, x = Net(), data()

    def step(m):
        torch.manual_seed(5)
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    torch.manual_seed(5)
    masks = [F.dropout(torch.ones(8, 4), 0.25).double() for _ in range(4)]
    h, outputs = data().double(), {}
    for i in range(4):
        h = outputs[f"blocks.{i}.0"] = linear(h, w, f"blocks.{i}.0")
        h = outputs[f"blocks.{i}"] = h * masks[i]
    loss = h.pow(2).mean()
    return {"params": params(loss, w), "modules": modules(loss, outputs), "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "bit_identical_training": True, "hooks_left_behind": 0},
    "params": {
        "blocks.0.0.weight": {"grad_norm": 0.641399247},
        "blocks.0.0.bias": {"grad_norm": 0.463452171},
        "blocks.1.0.weight": {"grad_norm": 1.13804838},
        "blocks.1.0.bias": {"grad_norm": 0.846430854},
        "blocks.2.0.weight": {"grad_norm": 0.778599435},
        "blocks.2.0.bias": {"grad_norm": 0.904753294},
        "blocks.3.0.weight": {"grad_norm": 1.29243293},
        "blocks.3.0.bias": {"grad_norm": 0.830901224},
    },
    "modules": {
        "blocks.0.0": {"calls": 1, "act_var": [0.642213422], "out_grad_norms": [0.274899458]},
        "blocks.0": {"calls": 1, "act_var": [0.870264051], "out_grad_norms": [0.212795258]},
        "blocks.1.0": {"calls": 1, "act_var": [0.363925575], "out_grad_norms": [0.421961761]},
        "blocks.1": {"calls": 1, "act_var": [0.557453864], "out_grad_norms": [0.323543716]},
        "blocks.2.0": {"calls": 1, "act_var": [0.100982156], "out_grad_norms": [0.439334121]},
        "blocks.2": {"calls": 1, "act_var": [0.220626622], "out_grad_norms": [0.335498645]},
        "blocks.3.0": {"calls": 1, "act_var": [0.213472466], "out_grad_norms": [0.374105221]},
        "blocks.3": {"calls": 1, "act_var": [0.370995277], "out_grad_norms": [0.280578907]},
    },
    "loss": 0.629796185,
}
