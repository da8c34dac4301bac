"""A decoder whose first self-attention gets zeros as values: its weights have gradient 0, by construction.

Source: facebookresearch/MaskFormer#63
Gist: the target of the first decoder layer is all zeros and only the queries carry positions, so that attention over
    zeros adds nothing: is that layer dead? Only at the first layer, and by design.
Expectation: projection weights exactly 0.0, not None; their output bias has a gradient; no alarm about the layer.
"""

import torch
from reference import double, linear, params
from torch import nn

KIND = "false-alarm"
SOURCE = "facebookresearch/MaskFormer#63"
D = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, D))
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.head = nn.Linear(D, 1)

    def forward(self, target):
        where = target + self.queries
        weights = torch.softmax(self.q(where) @ self.k(where).transpose(-1, -2) / D**0.5, -1)
        return self.head(target + self.o(weights @ self.v(target)) + self.queries)


def build():
    torch.manual_seed(315)
    model, target = Net(), torch.zeros(2, 3, D)

    def step(m):
        m.zero_grad()
        loss = m(target).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    """Values are the bias alone, equal in every place, so that attention weights do not matter."""
    w = double(build()[0])
    mixed = linear(w["v.bias"].expand(2, 3, D), w, "o") + w["queries"]
    loss = linear(mixed, w, "head").pow(2).mean()
    names = ("v.bias", "o.weight", "o.bias", "head.weight", "head.bias", "queries")
    return {"params": {"v.weight": {"grad_norm": 0.0}} | params(loss, {name: w[name] for name in names}), "loss": loss}


EXPECT = {
    "bounds": {"q.weight": [0.0, 1e-07], "k.weight": [0.0, 1e-07]},
    "diagnosis": {"label": "healthy", "not": ["disconnected", "vanishing", "dead_units", "never_called"]},
    "params": {
        "v.weight": {"grad_norm": 0.0},
        "v.bias": {"grad_norm": 0.0565592217},
        "o.weight": {"grad_norm": 0.052622833},
        "o.bias": {"grad_norm": 0.0875906732},
        "head.weight": {"grad_norm": 0.167990679},
        "head.bias": {"grad_norm": 0.138335711},
        "queries": {"grad_norm": 0.0575615463},
    },
    "loss": 0.00619839222,
}
