"""An actor whose output layer sits at the flat ends of its tanh: actions are 1 or -1, and stay there.

Source: floodsung/DDPG#6
Gist: after a few steps all actions are 1.0; the gradient at the actions looks healthy, what passes the tanh is next
    to nothing. There is no depth to blame.
Expectation: the drop across the activation is in the record; verdict saturated at the activation, not vanishing.
"""

from collections import OrderedDict

import torch
from reference import double, linear, modules, norms, params
from torch import nn

KIND = "diagnosis"
SOURCE = "floodsung/DDPG#6"
RTOL = 1e-3


def data():
    return torch.randn(16, 6, generator=torch.Generator().manual_seed(208)).double().float()


def build():
    torch.manual_seed(308)
    model = nn.Sequential(OrderedDict(fc=nn.Linear(6, 3).double(), act=nn.Tanh()))
    with torch.no_grad():
        model.fc.bias.copy_(torch.tensor([8.0, 9.0, -8.5]))
    x = data().double()

    def step(m):
        m.zero_grad()
        loss = (m(x) - 0.1).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    z = linear(data().double(), w, "fc")
    a = torch.tanh(z)
    loss = (a - 0.1).pow(2).mean()
    drop = norms(loss, {"fc": z, "act": a})
    found = {"params": params(loss, w), "modules": modules(loss, {"fc": z, "act": a}), "loss": loss}
    return found | {"evidence": {"fc / act": drop["fc"] / drop["act"]}}


EXPECT = {
    "diagnosis": {"label": "saturated", "where": "act", "not": ["vanishing with depth", "dead_units"]},
    "params": {"fc.weight": {"grad_norm": 1.19510609e-06}, "fc.bias": {"grad_norm": 6.89496165e-07}},
    "modules": {
        "fc": {"calls": 1, "act_var": [63.3540721], "out_grad_norms": [3.21659884e-07]},
        "act": {"calls": 1, "act_var": [0.888888451], "out_grad_norms": [0.280376656]},
    },
    "loss": 0.943332833,
    "evidence": {"fc / act": 1.14724203e-06},
}
