"""An LSTM cell over four time steps, its state detached in the middle.

Source: dpressel/dliss-tutorial#1
Gist: hidden and cell state are detached between chunks so that the gradient does not go further back; per-module
    numbers that mix the steps hide where it stops.
Expectation: four calls in order; hidden and cell state of the first two get nothing, those of the last two do.
"""

import torch
from reference import double, norms, params
from torch import nn

KIND = "repeated-calls"
SOURCE = "dpressel/dliss-tutorial#1"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        state = torch.zeros(5, 4), torch.zeros(5, 4)
        for t in range(4):
            if t == 2:
                state = tuple(part.detach() for part in state)
            state = self.cell(x[t], state)
        return self.head(state[0])


def data():
    return torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(235))


def build():
    torch.manual_seed(335)
    model, x = Net(), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w, x = double(build()[0]), data().double()
    h, c = torch.zeros(5, 4).double(), torch.zeros(5, 4).double()
    states = []
    for t in range(4):
        if t == 2:
            h, c = h.detach(), c.detach()
        gates = x[t] @ w["cell.weight_ih"].T + w["cell.bias_ih"] + h @ w["cell.weight_hh"].T + w["cell.bias_hh"]
        i, f, g, o = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        states.append((h, c))
    loss = (h @ w["head.weight"].T + w["head.bias"]).pow(2).mean()
    leaves = [norms(loss, {"0": h, "1": c}) for h, c in states]
    return {"params": params(loss, w), "modules": {"cell": {"calls": 4, "leaf_grad_norms": leaves}}, "loss": loss}


EXPECT = {
    "calls": {"cell": 4, "head": 1},
    "behaviour": {"must_not_raise": True},
    "params": {
        "cell.weight_ih": {"grad_norm": 0.0839916966},
        "cell.weight_hh": {"grad_norm": 0.067651315},
        "cell.bias_ih": {"grad_norm": 0.142966889},
        "cell.bias_hh": {"grad_norm": 0.142966889},
        "head.weight": {"grad_norm": 0.478584043},
        "head.bias": {"grad_norm": 1.01187525},
    },
    "modules": {
        "cell": {
            "calls": 4,
            "leaf_grad_norms": [
                {"0": None, "1": None},
                {"0": None, "1": None},
                {"0": 0.0132043609, "1": 0.039680539},
                {"0": 0.260314918, "1": 0.117403924},
            ],
        }
    },
    "loss": 0.258331612,
}
