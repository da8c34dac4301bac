"""Sharpness-aware minimisation: a first backward moves the weights, a second one makes the step.

Source: davda54/sam#17
Gist: two forward passes per step count batch statistics twice, and a logger shows the first gradient, the sum, or two
    steps for one.
Expectation: one row per optimizer step, with the gradient it used: that at the moved weights.
"""

import torch
from reference import double, linear, params
from torch import nn

KIND = "training-loop"
SOURCE = "davda54/sam#17"
RHO = 0.5


def data():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(240))


def build():
    torch.manual_seed(340)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(m):
        return (m(x) - 1).pow(2).mean()

    def step(m):
        loss = loss_of(m)
        loss.backward()
        with torch.no_grad():
            size = torch.stack([p.grad.norm() for p in m.parameters()]).norm()
            moved = [RHO * p.grad / size for p in m.parameters()]
            for p, change in zip(m.parameters(), moved, strict=True):
                p.add_(change)
        optimizer.zero_grad()
        loss_of(m).backward()
        with torch.no_grad():
            for p, change in zip(m.parameters(), moved, strict=True):
                p.sub_(change)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    step.optimizer = optimizer
    return model, step


def oracle():
    w, x = double(build()[0]), data().double()

    def loss_of(w):
        return (linear(torch.tanh(linear(x, w, "0")), w, "2") - 1).pow(2).mean()

    gradients = torch.autograd.grad(loss_of(w), list(w.values()))
    size = torch.stack([g.norm() for g in gradients]).norm()
    moved = {n: (p + RHO * g / size).detach().requires_grad_() for (n, p), g in zip(w.items(), gradients, strict=True)}
    return {"params": params(loss_of(moved), moved), "loss": loss_of(w)}


EXPECT = {
    "behaviour": {"bit_identical_training": True, "hooks_left_behind": 0},
    "diagnosis": {"label": "healthy"},
    "params": {
        "0.weight": {"grad_norm": 0.906386239},
        "0.bias": {"grad_norm": 1.41590243},
        "2.weight": {"grad_norm": 1.64075896},
        "2.bias": {"grad_norm": 2.50776385},
    },
    "loss": 0.531773975,
}
