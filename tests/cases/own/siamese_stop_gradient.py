"""One encoder for two views, with the gradient stopped on one side.

Source: facebookresearch/simsiam#27
Gist: both branches share their weights, the error goes back through one only: does the other get none? Recorders that
    keep one value per module show whichever branch came last, or a module without gradient.
Expectation: two calls in call order, the second without gradient event (None), one gradient of the shared weights.
"""

import torch
from reference import double, linear, norms, params, variance
from torch import nn

KIND = "repeated-calls"
SOURCE = "facebookresearch/simsiam#27"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.predictor = nn.Linear(5, 4), nn.Linear(4, 4)

    def forward(self, a, b):
        return self.predictor(torch.tanh(self.encoder(a))), torch.tanh(self.encoder(b)).detach()


def data():
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(234))


def build():
    torch.manual_seed(334)
    model, (a, b) = Net(), data()

    def step(m):
        m.zero_grad()
        predicted, target = m(a, b)
        loss = (predicted - target).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w, (a, b) = double(build()[0]), data().double()
    first, second = linear(a, w, "encoder"), linear(b, w, "encoder")
    loss = (linear(torch.tanh(first), w, "predictor") - torch.tanh(second).detach()).pow(2).mean()
    gradient = norms(loss, {"first": first})["first"]
    encoder = {"calls": 2, "out_grad_norms": [gradient, None], "act_var": [variance(first), variance(second)]}
    return {"params": params(loss, w), "modules": {"encoder": encoder}, "loss": loss}


EXPECT = {
    "calls": {"encoder": 2, "predictor": 1},
    "diagnosis": {"label": "healthy", "not": ["disconnected"]},
    "params": {
        "encoder.weight": {"grad_norm": 0.425948065},
        "encoder.bias": {"grad_norm": 0.195365515},
        "predictor.weight": {"grad_norm": 0.657680267},
        "predictor.bias": {"grad_norm": 0.6799395},
    },
    "modules": {"encoder": {"calls": 2, "out_grad_norms": [0.195037353, None], "act_var": [0.4482383, 0.417387965]}},
    "loss": 0.840235179,
}
