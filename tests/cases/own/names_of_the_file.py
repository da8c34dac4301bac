"""Modules that are called as groups and series of a run file are: gradients, outputs, scalars, norm, step.

Source: tensorflow/tensorflow#9053
Gist: "loss" and "loss/regularization" cannot both be shown: a name that is also the beginning of another, or of the
    file's own layout, hides it.
Expectation: every parameter comes back with its own number, under its own name.
"""

import torch
from reference import double, linear, norms
from torch import nn

KIND = "files"
SOURCE = "tensorflow/tensorflow#9053"
NAMES = ("gradients", "outputs", "scalars", "norm", "step", "parameter_gradients", "loss")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(3, 1, bias=False))
        self.loss.add_module("regularization", nn.Linear(3, 1, bias=False))

    def forward(self, x):
        parts = [getattr(self, name)(x) for name in NAMES]
        return [*parts, self.loss.regularization(x)]


def data():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(217))


def build():
    torch.manual_seed(317)
    model, x = Net(), data()

    def step(m):
        m.zero_grad()
        loss = sum((k + 1) * y.pow(2).mean() for k, y in enumerate(m(x)))
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    names = (*NAMES, "loss.regularization")
    loss = sum((k + 1) * linear(data().double(), w, name).pow(2).mean() for k, name in enumerate(names))
    return {"params": {name: {"grad_norm": norm} for name, norm in norms(loss, w).items()}, "loss": loss}


EXPECT = {
    "names": ["gradients.weight", "scalars.weight", "loss.weight", "loss.regularization.weight", "norm.weight"],
    "behaviour": {"must_not_raise": True, "roundtrip_exact": True},
    "params": {
        "gradients.weight": {"grad_norm": 3.0127353},
        "outputs.weight": {"grad_norm": 2.76909858},
        "scalars.weight": {"grad_norm": 4.51067499},
        "norm.weight": {"grad_norm": 8.19147581},
        "step.weight": {"grad_norm": 2.06868825},
        "parameter_gradients.weight": {"grad_norm": 5.19791877},
        "loss.weight": {"grad_norm": 15.3884657},
        "loss.regularization.weight": {"grad_norm": 16.0822759},
    },
    "loss": 14.8714813,
}
