"""Only the middle of a model is compiled, in place with Module.compile().

Source: pytorch/pytorch#142358
Gist: the class and the name of the module stay, so nothing shows that it is compiled; hooks on it, or inside of it,
    are ignored or break the compiled code.
Expectation: eager values on the recorded step inside and outside, or an explicit word; never zeros.
"""

import torch
from reference import double, linear, modules, params
from torch import nn

KIND = "compile"
SOURCE = "pytorch/pytorch#142358"


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(206))


def build():
    torch.manual_seed(306)
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)), data()
    model[1].compile(backend="eager")
    model(x).sum().backward()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    first = linear(data().double(), w, "0")
    inner = linear(first, w, "1.0")
    block = torch.tanh(inner)
    last = linear(block, w, "2")
    loss = last.pow(2).mean()
    outputs = {"0": first, "1.0": inner, "1": block, "2": last}
    return {"params": params(loss, w), "modules": modules(loss, outputs), "loss": loss}


EXPECT = {
    "names_clean": ["0.weight", "1.0.weight", "2.bias"],
    "behaviour": {
        "must_not_raise": True,
        "module_data": "eager values, or explicit 'compiled, not observable'; never zeros",
        "param_gradients": "always",
    },
    "params": {
        "0.weight": {"grad_norm": 0.024256318},
        "0.bias": {"grad_norm": 0.0708191079},
        "1.0.weight": {"grad_norm": 0.0792049416},
        "1.0.bias": {"grad_norm": 0.160050182},
        "2.weight": {"grad_norm": 0.379180569},
        "2.bias": {"grad_norm": 0.692037899},
    },
    "modules": {
        "0": {"calls": 1, "act_var": [0.187428921], "out_grad_norms": [0.029686286]},
        "1.0": {"calls": 1, "act_var": [0.0869685102], "out_grad_norms": [0.0674463672]},
        "1": {"calls": 1, "act_var": [0.0620092268], "out_grad_norms": [0.0745597643]},
        "2": {"calls": 1, "act_var": [0.00487579142], "out_grad_norms": [0.288218557]},
    },
    "loss": 0.124604905,
}
