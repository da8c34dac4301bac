"""Spectral normalisation: each forward in training mode does one power iteration on two buffers.

Source: pytorch/pytorch#13350
Gist: an extra forward, or a copy of the module that shares its buffers, moves the estimate on and changes the weights
    of the next step.
Expectation: after two steps the buffers are those of exactly two iterations; training as without a watch.
"""

import torch
from reference import double
from torch import nn

KIND = "no-side-effects"
SOURCE = "pytorch/pytorch#13350"
N_STEPS = 2


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(232))


def build():
    torch.manual_seed(332)
    model, x = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3)), nn.Linear(3, 1)), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    model, _ = build()
    w, u = double(model)["0.weight_orig"].detach(), model[0].weight_u.double()
    for _ in range(2):
        v = torch.nn.functional.normalize(w.T @ u, dim=0, eps=1e-12)
        u = torch.nn.functional.normalize(w @ v, dim=0, eps=1e-12)
    return {"buffers": {"0.weight_u": u.sum(), "0.weight_v": v.sum()}}


EXPECT = {
    "behaviour": {"bit_identical_training": True, "training_flag_unchanged": True, "must_not_raise": True},
    "buffers": {"0.weight_u": -1.09038083, "0.weight_v": 1.74168961},
}
