"""Two zero-initialised layers in a row: each waits for the other, and neither ever moves.

Source: lllyasviel/ControlNet#510
Gist: one zero convolution starts to train after one step, since its input is not zero; behind another one its input
    is zero, too, and the argument does not hold.
Expectation: both weights exactly 0.0 on every step: zero gradient that does not go away, not zero by initialisation.
"""

import torch
from reference import double, linear, params
from torch import nn

KIND = "zero-init"
SOURCE = "lllyasviel/ControlNet#510"
N_STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.first.weight)
        nn.init.zeros_(self.second.weight)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h + self.second(self.first(h)))


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(246))


def build():
    torch.manual_seed(346)
    model, x = Net(), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(m):
        optimizer.zero_grad()
        loss = (m(x) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    step.optimizer = optimizer
    return model, step


def oracle():
    w = double(build()[0])
    h = torch.tanh(linear(data().double(), w, "body"))
    loss = (linear(h + linear(linear(h, w, "first"), w, "second"), w, "head") - 1).pow(2).mean()
    return {"steps": [{"params": params(loss, w), "loss": loss}] * 3}


EXPECT = {
    "diagnosis": {
        "per_module": {"first": "zero_gradient", "second": "zero_gradient", "body": "healthy", "head": "healthy"},
        "not": ["vanishing", "zero_grad_by_init", "disconnected"],
    },
    "steps": [
        {
            "params": {
                "body.weight": {"grad_norm": 0.329497651},
                "body.bias": {"grad_norm": 0.544626173},
                "head.weight": {"grad_norm": 0.941102839},
                "head.bias": {"grad_norm": 1.80134786},
                "first.weight": {"grad_norm": 0.0},
                "second.weight": {"grad_norm": 0.0},
            },
            "loss": 0.829539386,
        },
        {
            "params": {
                "body.weight": {"grad_norm": 0.329497651},
                "body.bias": {"grad_norm": 0.544626173},
                "head.weight": {"grad_norm": 0.941102839},
                "head.bias": {"grad_norm": 1.80134786},
                "first.weight": {"grad_norm": 0.0},
                "second.weight": {"grad_norm": 0.0},
            },
            "loss": 0.829539386,
        },
        {
            "params": {
                "body.weight": {"grad_norm": 0.329497651},
                "body.bias": {"grad_norm": 0.544626173},
                "head.weight": {"grad_norm": 0.941102839},
                "head.bias": {"grad_norm": 1.80134786},
                "first.weight": {"grad_norm": 0.0},
                "second.weight": {"grad_norm": 0.0},
            },
            "loss": 0.829539386,
        },
    ],
}
