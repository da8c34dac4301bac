"""One layer in the middle is TorchScript, which takes no hooks.

Source: sksq96/pytorch-summary#103
Gist: "register_forward_hook is not supported on ScriptModules": one scripted part, and the whole model cannot be
    looked at.
Expectation: the rest is recorded as usual; the scripted part's parameters have gradients, and that its calls cannot
    be seen is said.
"""

import torch
from reference import double, linear, modules, params
from torch import nn

KIND = "special-modules"
SOURCE = "sksq96/pytorch-summary#103"


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(236))


def build():
    torch.manual_seed(336)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), torch.jit.script(nn.Linear(4, 3)), nn.Linear(3, 1))
    x = data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    first = linear(data().double(), w, "0")
    last = linear(linear(torch.tanh(first), w, "2"), w, "3")
    loss = last.pow(2).mean()
    return {"params": params(loss, w), "modules": modules(loss, {"0": first, "3": last}), "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "module_data": "real values or explicit 'not observed'"},
    "diagnosis": {"per_module": {"0": "healthy", "2": "coverage_gap or real data, never 'dead'", "3": "healthy"}},
    "params": {
        "0.weight": {"grad_norm": 0.147472681},
        "0.bias": {"grad_norm": 0.14119557},
        "2.weight": {"grad_norm": 0.104324118},
        "2.bias": {"grad_norm": 0.212526886},
        "3.weight": {"grad_norm": 0.267585196},
        "3.bias": {"grad_norm": 0.732803027},
    },
    "modules": {
        "0": {"calls": 1, "act_var": [0.32463821], "out_grad_norms": [0.0594354262]},
        "3": {"calls": 1, "act_var": [0.00421381658], "out_grad_norms": [0.303824385]},
    },
    "loss": 0.138463886,
}
