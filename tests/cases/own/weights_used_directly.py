"""A fused path takes the weights of its layers and calls none of them.

Source: state-spaces/mamba#59
Gist: hooks on in_proj and conv1d never fire, since the fast implementation uses their weights in a function of its
    own; a tool says the layers are never used.
Expectation: no call, but a gradient for each weight; a gap in what was seen, neither dead nor unused.
"""

import torch
from reference import double, linear, params
from torch import nn
from torch.nn import functional as F

KIND = "uncalled-or-unregistered"
SOURCE = "state-spaces/mamba#59"


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.conv, self.out_proj = (
            nn.Linear(4, 6),
            nn.Conv1d(6, 6, 3, padding=2, groups=6),
            nn.Linear(6, 4),
        )

    def forward(self, x):
        y = F.linear(x, self.in_proj.weight, self.in_proj.bias).transpose(1, 2)
        y = F.conv1d(y, self.conv.weight, self.conv.bias, padding=2, groups=6)[..., : x.shape[1]]
        return F.linear(F.silu(y.transpose(1, 2)), self.out_proj.weight, self.out_proj.bias)


def data():
    return torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(244))


def build():
    torch.manual_seed(344)
    model, x = nn.Sequential(Mixer(), nn.Linear(4, 1)), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w, x = double(build()[0]), data().double()
    y = linear(x, w, "0.in_proj")
    padded = torch.cat([torch.zeros(2, 2, 6).double(), y], 1)
    mixed = sum(padded[:, k : k + 5] * w["0.conv.weight"][:, 0, k] for k in range(3)) + w["0.conv.bias"]
    loss = linear(linear(mixed * torch.sigmoid(mixed), w, "0.out_proj"), w, "1").pow(2).mean()
    return {"params": params(loss, w), "loss": loss}


EXPECT = {
    "calls": {"0": 1, "0.in_proj": 0, "0.conv": 0, "0.out_proj": 0, "1": 1},
    "diagnosis": {
        "label": "healthy",
        "per_module": {
            "0.in_proj": "coverage_gap or real data, never 'dead'",
            "0.conv": "coverage_gap or real data, never 'dead'",
        },
        "not": ["never_called", "disconnected", "dead_units"],
    },
    "params": {
        "0.in_proj.weight": {"grad_norm": 0.046663095},
        "0.in_proj.bias": {"grad_norm": 0.0417401101},
        "0.conv.weight": {"grad_norm": 0.0460278263},
        "0.conv.bias": {"grad_norm": 0.126888655},
        "0.out_proj.weight": {"grad_norm": 0.169185548},
        "0.out_proj.bias": {"grad_norm": 0.403432353},
        "1.weight": {"grad_norm": 0.462002962},
        "1.bias": {"grad_norm": 0.768651771},
    },
    "loss": 0.149946855,
}
