"""One layer used twice, once inside a reentrant checkpoint and once outside.

Source: pytorch/pytorch#81296
Gist: the hook on the shared weight fires once without checkpointing and twice with it: the nested backward of the
    checkpoint accumulates by itself. Loggers that keep the last value, or the first, show half a gradient.
Expectation: two calls, in call order, and the gradient of the whole step: the sum over both uses.
"""

import torch
from reference import double, linear, norms, params
from torch import nn
from torch.utils.checkpoint import checkpoint

KIND = "checkpointing"
SOURCE = "pytorch/pytorch#81296"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = checkpoint(self.shared, x, use_reentrant=True)
        return self.head(torch.tanh(self.shared(torch.tanh(h))))


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(204))


def build():
    torch.manual_seed(304)
    model, x = Net(), data().requires_grad_()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    first = linear(data().double(), w, "shared")
    second = linear(torch.tanh(first), w, "shared")
    loss = linear(torch.tanh(second), w, "head").pow(2).mean()
    calls = norms(loss, {"1": first, "2": second})
    shared = {"calls": 2, "out_grad_norms": list(calls.values())}
    return {"params": params(loss, w), "modules": {"shared": shared}, "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "model_output_unchanged": True},
    "params": {
        "shared.weight": {"grad_norm": 0.32379203},
        "shared.bias": {"grad_norm": 1.07879888},
        "head.weight": {"grad_norm": 0.606248076},
        "head.bias": {"grad_norm": 1.19754506},
    },
    "modules": {"shared": {"calls": 2, "out_grad_norms": [0.195842448, 0.294445267]}},
    "loss": 0.369159543,
}
