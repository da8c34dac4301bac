"""The model is plain; what is compiled is the function that calls it and computes the loss.

Source: pytorch/pytorch#91665
Gist: none of the hooks fire, since the compiled function inlines the modules, and nothing about the model says so.
Expectation: parameter gradients in any case; the modules have eager values, or are said not to be observable.
"""

import torch
from reference import double, linear, params
from torch import nn

KIND = "compile"
SOURCE = "pytorch/pytorch#91665"


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(207))


def build():
    torch.manual_seed(307)
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), data()

    @torch.compile(backend="eager")
    def loss_of(m, x):
        return m(x).pow(2).mean()

    loss_of(model, x).backward()  # compiled before anybody watches

    def step(m):
        m.zero_grad()
        loss = loss_of(m, x)
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    loss = linear(torch.tanh(linear(data().double(), w, "0")), w, "2").pow(2).mean()
    return {"params": params(loss, w), "loss": loss}


EXPECT = {
    "behaviour": {
        "must_not_raise": True,
        "module_data": "eager values, or explicit 'compiled, not observable'; never zeros",
        "param_gradients": "always",
    },
    "diagnosis": {"not": ["no_backward", "disconnected", "vanishing"]},
    "params": {
        "0.weight": {"grad_norm": 0.164345432},
        "0.bias": {"grad_norm": 0.171314496},
        "2.weight": {"grad_norm": 0.619651601},
        "2.bias": {"grad_norm": 0.678108216},
    },
    "loss": 0.186530502,
}
