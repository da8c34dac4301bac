"""Spectral normalisation: the parameter is weight_orig, and weight is computed anew in every forward.

Source: pytorch/pytorch#12737
Gist: "SpectralNorm in eval doesn't connect grad to weight_orig": whoever looks at layer.weight.grad sees nothing,
    since weight is no parameter any more.
Expectation: the gradient of weight_orig, through the division by the largest singular value, in training mode.
"""

import torch
from reference import double, linear, modules, params
from torch import nn
from torch.nn import functional as F

KIND = "special-modules"
SOURCE = "pytorch/pytorch#12737"


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(237))


def build():
    torch.manual_seed(337)
    model, x = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 1)), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    model, _ = build()
    w, u = double(model), model[0].weight_u.double()
    origin = w["0.weight_orig"]
    v = F.normalize(origin.detach().T @ u, dim=0, eps=1e-12)
    u = F.normalize(origin.detach() @ v, dim=0, eps=1e-12)
    first = data().double() @ (origin / (u @ origin @ v)).T + w["0.bias"]
    last = linear(torch.tanh(first), w, "2")
    loss = last.pow(2).mean()
    return {"params": params(loss, w), "modules": modules(loss, {"0": first, "2": last}), "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "user_hooks_left_intact": 1},
    "diagnosis": {"label": "healthy"},
    "params": {
        "0.bias": {"grad_norm": 0.0996339516},
        "0.weight_orig": {"grad_norm": 0.123599105},
        "2.weight": {"grad_norm": 0.328352187},
        "2.bias": {"grad_norm": 0.496415663},
    },
    "modules": {
        "0": {"calls": 1, "act_var": [0.356273142], "out_grad_norms": [0.04664166]},
        "2": {"calls": 1, "act_var": [0.0045825233], "out_grad_norms": [0.210062928]},
    },
    "loss": 0.0661896508,
}
