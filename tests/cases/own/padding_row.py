"""An embedding with padding_idx: one row never gets a gradient, by design.

Source: ibalazevic/TuckER#17
Gist: the gradient of the first entity is zero in every step; is it broken? Tools that look for zero rows say dead.
Expectation: the norm of the embedding is that of the other rows; healthy, no zero gradient and no disconnection.
"""

import torch
from reference import double, linear, params, total
from torch import nn
from torch.nn import functional as F

KIND = "false-alarm"
SOURCE = "ibalazevic/TuckER#17"
N_STEPS = 2
IDS = torch.tensor([[1, 2, 0, 0], [3, 4, 2, 0], [1, 3, 4, 2]])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(5, 6, padding_idx=0), nn.Linear(6, 1)

    def forward(self, ids):
        return self.out(torch.tanh(self.emb(ids)).sum(1))


def build():
    torch.manual_seed(314)
    model = Net()

    def step(m):
        m.zero_grad()
        loss = (m(IDS) - 1).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    loss = (linear(torch.tanh(F.embedding(IDS, w["emb.weight"], padding_idx=0)).sum(1), w, "out") - 1).pow(2).mean()
    return {"steps": [{"params": params(loss, w), "total_grad_norm": total(loss, w), "loss": loss}] * 2}


EXPECT = {
    "diagnosis": {"label": "healthy", "not": ["zero_gradient", "dead_units", "disconnected", "vanishing"]},
    "steps": [
        {
            "params": {
                "emb.weight": {"grad_norm": 2.65869351},
                "out.weight": {"grad_norm": 7.84966971},
                "out.bias": {"grad_norm": 3.22100403},
            },
            "total_grad_norm": 8.89161587,
            "loss": 2.61565174,
        },
        {
            "params": {
                "emb.weight": {"grad_norm": 2.65869351},
                "out.weight": {"grad_norm": 7.84966971},
                "out.bias": {"grad_norm": 3.22100403},
            },
            "total_grad_norm": 8.89161587,
            "loss": 2.61565174,
        },
    ],
}
