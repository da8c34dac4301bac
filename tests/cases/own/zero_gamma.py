"""A residual block whose last BatchNorm starts with scale 0: an identity at first, by design.

Source: AlexHex7/Non-local_pytorch#1
Gist: "will they compute the same gradients and undergo the exact same updates?": at step 0 the branch gets gradient
    0, and the scale itself does not.
Expectation: step 0: zero by initialisation, transient; step 1, after one update of the scale: healthy.
"""

import torch
from reference import double, params
from torch import nn

KIND = "zero-init"
SOURCE = "AlexHex7/Non-local_pytorch#1"
N_STEPS = 2
LR = 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        return x + self.norm(self.conv(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.block(x)))


def data():
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(245))


def build():
    torch.manual_seed(345)
    model, x = Net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(m):
        optimizer.zero_grad()
        loss = (m(x) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    step.optimizer = optimizer
    return model, step


def oracle():
    w, x, steps = double(build()[0]), data().double(), []
    for _ in range(2):
        z = x @ w["block.conv.weight"].T
        z = (z - z.mean(0)) / (z.var(0, unbiased=False) + 1e-5).sqrt() * w["block.norm.weight"] + w["block.norm.bias"]
        loss = (torch.tanh(x + z) @ w["head.weight"].T + w["head.bias"] - 1).pow(2).mean()
        steps.append({"params": params(loss, w), "loss": loss})
        gradients = torch.autograd.grad(loss, list(w.values()))
        w = {n: (p - LR * g).detach().requires_grad_() for (n, p), g in zip(w.items(), gradients, strict=True)}
    return {"steps": steps}


EXPECT = {
    "diagnosis": {
        "step0": {"block.conv": "zero_grad_by_init (transient)", "block.norm": "healthy", "head": "healthy"},
        "step1": {"block.conv": "healthy", "block.norm": "healthy"},
        "not": ["vanishing", "dead_units", "disconnected"],
    },
    "steps": [
        {
            "params": {
                "block.conv.weight": {"grad_norm": 0.0},
                "block.norm.weight": {"grad_norm": 0.266294453},
                "block.norm.bias": {"grad_norm": 0.696344434},
                "head.weight": {"grad_norm": 0.466862383},
                "head.bias": {"grad_norm": 1.5064796},
            },
            "loss": 0.707098469,
        },
        {
            "params": {
                "block.conv.weight": {"grad_norm": 0.0233054963},
                "block.norm.weight": {"grad_norm": 0.0933571707},
                "block.norm.bias": {"grad_norm": 0.180601192},
                "head.weight": {"grad_norm": 0.457988877},
                "head.bias": {"grad_norm": 0.389834322},
            },
            "loss": 0.149078362,
        },
    ],
}
