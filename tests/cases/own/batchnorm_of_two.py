"""BatchNorm over a batch of two: every output is 1 or -1, and next to nothing of the gradient comes through.

Source: torch/nn#770
Gist: after the norm every entry is either -1 or 1 whatever goes in; with two samples the sign of their difference is
    all that is left, and its derivative is 0 up to epsilon.
Expectation: the exact factor; verdict that this norm kills the gradient, not that it vanishes with depth.
"""

import torch
from reference import double, linear, norms, params
from torch import nn

KIND = "ln-jacobian"
SOURCE = "torch/nn#770"
RTOL = 2e-2


def data():
    return 3.0 * torch.randn(2, 5, generator=torch.Generator().manual_seed(228))


def build():
    torch.manual_seed(328)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    x = data()

    def step(m):
        m.zero_grad()
        loss = (m(x) - torch.tensor([[1.0, 0.0], [0.0, 2.0]])).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    z = linear(data().double(), w, "0")
    y = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() * w["1.weight"] + w["1.bias"]
    loss = (linear(y, w, "2") - torch.tensor([[1.0, 0.0], [0.0, 2.0]])).pow(2).mean()
    drop = norms(loss, {"0": z, "1": y})
    chosen = {name: w[name] for name in ("1.weight", "1.bias", "2.weight", "2.bias")}
    return {"params": params(loss, chosen), "evidence": {"0 / 1": drop["0"] / drop["1"]}, "loss": loss}


EXPECT = {
    "ln_module": "1",
    "diagnosis": {"label": "norm_kills_gradient", "where": "1", "not": ["vanishing with depth"]},
    "params": {
        "1.weight": {"grad_norm": 0.690366274},
        "1.bias": {"grad_norm": 1.07054453},
        "2.weight": {"grad_norm": 3.18471229},
        "2.bias": {"grad_norm": 1.36692544},
    },
    "evidence": {"0 / 1": 1.32145772e-05},
    "loss": 1.77945372,
}
