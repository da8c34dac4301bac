"""Layers kept in a python list: they run and are differentiated, and no optimizer knows them.

Source: pytorch/pytorch#38639
Gist: as soon as a module is put into a list its parameters get invisible: model.parameters() does not list them, and
    they never train, without any message.
Expectation: the registered layers have their numbers, and it is said that parameters in use are not registered.
"""

import torch
from reference import linear, modules, params
from torch import nn

KIND = "uncalled-or-unregistered"
SOURCE = "pytorch/pytorch#38639"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.hidden = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.last(x)


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(243))


def build():
    torch.manual_seed(343)
    model, x = Net(), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    model, _ = build()
    w = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    for i, layer in enumerate(model.hidden):
        w |= {f"{i}.{name}": p.detach().double() for name, p in layer.named_parameters()}
    first = linear(data().double(), w, "first")
    x = torch.tanh(first)
    for i in range(2):
        x = torch.tanh(linear(x, w, str(i)))
    last = linear(x, w, "last")
    loss = last.pow(2).mean()
    known = {name: p for name, p in w.items() if p.requires_grad}
    return {"params": params(loss, known), "modules": modules(loss, {"first": first, "last": last}), "loss": loss}


EXPECT = {
    "diagnosis": {"label": "unregistered_parameters", "not": ["vanishing", "disconnected", "never_called"]},
    "params": {
        "first.weight": {"grad_norm": 0.212584561},
        "first.bias": {"grad_norm": 0.171187417},
        "last.weight": {"grad_norm": 0.524179848},
        "last.bias": {"grad_norm": 0.643927989},
    },
    "modules": {
        "first": {"calls": 1, "act_var": [0.146227931], "out_grad_norms": [0.081958801]},
        "last": {"calls": 1, "act_var": [0.0177045712], "out_grad_norms": [0.284447283]},
    },
    "loss": 0.121365385,
}
