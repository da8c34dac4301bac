"""LBFGS: the optimizer itself runs forward and backward, several times in one step.

Source: Lightning-AI/pytorch-lightning#4188
Gist: with an optimizer that takes a closure there is one backward too many, or all of them are added up; per-step
    loggers fire in the middle of a step.
Expectation: one row for two evaluations, with call, backward pass and gradient of the last one: what .grad holds when
    the step is over, and no sum.
"""

import torch
from reference import double, norms
from torch import nn

KIND = "training-loop"
SOURCE = "Lightning-AI/pytorch-lightning#4188"
LR = 0.1


def data():
    generator = torch.Generator().manual_seed(238)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator)


def build():
    torch.manual_seed(338)
    model, (x, y) = nn.Linear(4, 1, bias=False), data()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=LR, max_iter=2, tolerance_grad=0.0, tolerance_change=0.0)

    def step(m):
        def closure():
            optimizer.zero_grad()
            loss = (m(x) - y).pow(2).mean()
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    step.optimizer = optimizer
    return model, step


def oracle():
    """The first direction is the negative gradient, with a step of min(1, 1 / |g|_1) * lr."""
    w, (x, y) = double(build()[0]), (t.double() for t in data())
    weight, passes = w["weight"], []
    for _ in range(2):
        loss = (x @ weight.T - y).pow(2).mean()
        gradient = torch.autograd.grad(loss, weight, retain_graph=True)[0]
        passes.append(norms(loss, {"w": weight})["w"])
        weight = (weight - min(1.0, 1.0 / float(gradient.abs().sum())) * LR * gradient).detach().requires_grad_()
    first = (x @ w["weight"].T - y).pow(2).mean()
    kept = {"grad_norm": passes[-1], "per_backward": passes[-1:]}
    return {"params": {"weight": kept}, "modules": {"": {"calls": 1}}, "loss": first}


EXPECT = {
    "calls_per_step": {"": 1},
    "backwards_per_step": 1,
    "behaviour": {"bit_identical_training": True},
    "params": {"weight": {"grad_norm": 0.651788505, "per_backward": [0.651788505]}},
    "modules": {"": {"calls": 1}},
    "loss": 0.783243471,
}
