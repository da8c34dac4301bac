"""The root of a variance of features that are all equal: 0 in the forward pass, NaN in backward.

Source: pytorch/pytorch#4320
Gist: a standard deviation has no gradient where all entries agree (a padded channel, a new layer); the value looks
    fine.
Expectation: finite forward, first non-finite gradient at the output of the layer before the std, after the head.
"""

import torch
from reference import double, linear, norms, variance
from torch import nn

KIND = "nan"
SOURCE = "pytorch/pytorch#4320"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(1, 1)

    def forward(self, x):
        return self.head(self.body(x).var(-1, keepdim=True).sqrt())


def data():
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(231))
    x[2] = 0.0
    return x


def build():
    torch.manual_seed(331)
    model, x = Net(), data()
    with torch.no_grad():
        model.body.bias.fill_(0.5)

    def step(m):
        m.zero_grad()
        loss = (m(x) - 1).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    y = linear(data().double(), w, "body")
    spread = ((y - y.mean(-1, keepdim=True)).pow(2).sum(-1, keepdim=True) / 2).sqrt()
    out = linear(spread, w, "head")
    loss = (out - 1).pow(2).mean()
    head = {"calls": 1, "act_var": [variance(out)], "out_grad_norms": [norms(loss, {"o": out})["o"]]}
    body = {"calls": 1, "act_var": [variance(y)], "out_grad_norms": [float("nan")]}
    return {"modules": {"head": head, "body": body}, "loss": loss}


EXPECT = {
    "diagnosis": {
        "label": "nonfinite_backward",
        "first_bad": "gradient at the output of body",
        "forward_finite": True,
        "last_good": "head",
        "not": ["nonfinite_forward", "vanishing"],
    },
    "modules": {
        "head": {"calls": 1, "act_var": [0.0139395485], "out_grad_norms": [1.27417309]},
        "body": {"calls": 1, "act_var": [0.0776679125], "out_grad_norms": ["nan"]},
    },
    "loss": 2.02939634,
}
