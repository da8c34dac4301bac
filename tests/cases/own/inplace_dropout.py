"""Dropout(inplace=True) directly after a Linear: what the Linear put out is gone when backward comes.

Source: BierOne/bottom-up-attention-vqa#6
Gist: "one of the variables needed for gradient computation has been modified by an inplace operation"; reading a kept
    output in backward shows the masked values.
Expectation: the variance is that before the mask, the gradient that at the unmasked output.
"""

import torch
from reference import double, linear, modules, params
from torch import nn
from torch.nn import functional as F

KIND = "inplace"
SOURCE = "BierOne/bottom-up-attention-vqa#6"


def data():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(221))


def build():
    torch.manual_seed(321)
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5, inplace=True), nn.Linear(6, 1)), data()

    def step(m):
        torch.manual_seed(6)
        m.zero_grad()
        loss = (m(x) - 1).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    torch.manual_seed(6)
    mask = F.dropout(torch.ones(8, 6), 0.5).double()
    first = linear(data().double(), w, "0")
    masked = first * mask
    loss = (linear(masked, w, "2") - 1).pow(2).mean()
    return {"params": params(loss, w), "modules": modules(loss, {"0": first, "1": masked}), "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "bit_identical_training": True},
    "params": {
        "0.weight": {"grad_norm": 1.23244099},
        "0.bias": {"grad_norm": 0.829994596},
        "2.weight": {"grad_norm": 1.40806773},
        "2.bias": {"grad_norm": 2.05442103},
    },
    "modules": {
        "0": {"calls": 1, "act_var": [0.252804802], "out_grad_norms": [0.410031452]},
        "1": {"calls": 1, "act_var": [0.393958513], "out_grad_norms": [0.291226858]},
    },
    "loss": 1.12158344,
}
