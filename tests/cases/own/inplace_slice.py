"""After a module has run, a part of its output is multiplied in place.

Source: pytorch/pytorch#8874
Gist: writing into a view rewrites the history of its base, and a hook that was set before may sit on a tensor that is
    no longer part of the graph, or see the gradient of the changed values.
Expectation: the gradient with respect to what the module returned, before the write.
"""

import torch
from reference import double, linear, modules, params
from torch import nn

KIND = "inplace"
SOURCE = "pytorch/pytorch#8874"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, x):
        y = self.first(x)
        y[:, :2].mul_(3.0)
        y[0] += 1.0
        return self.last(torch.tanh(y))


def data():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(222))


def build():
    torch.manual_seed(322)
    model, x = Net(), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    first = linear(data().double(), w, "first")
    factor, added = torch.ones(6).double(), torch.zeros(5, 1).double()
    factor[:2], added[0] = 3.0, 1.0
    last = linear(torch.tanh(first * factor + added), w, "last")
    loss = last.pow(2).mean()
    return {"params": params(loss, w), "modules": modules(loss, {"first": first, "last": last}), "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "model_output_unchanged": True},
    "params": {
        "first.weight": {"grad_norm": 0.119433103},
        "first.bias": {"grad_norm": 0.0819552078},
        "last.weight": {"grad_norm": 0.145093508},
        "last.bias": {"grad_norm": 0.0060809048},
    },
    "modules": {
        "first": {"calls": 1, "act_var": [0.293253058], "out_grad_norms": [0.114500119]},
        "last": {"calls": 1, "act_var": [0.033334089], "out_grad_norms": [0.163323809]},
    },
    "loss": 0.0333433333,
}
