"""The whole model is saved with torch.save in the middle of training, and loaded again.

Source: wandb/wandb#5573
Gist: "Can't pickle local object ...<lambda>", after days of training; removing the hooks first loses the log.
Expectation: saving and loading work between forward and backward; the loaded model is the same, runs by itself, and
    adds nothing to the record.
"""

import io

import torch
from reference import double, linear, modules, params
from torch import nn

KIND = "lifecycle"
SOURCE = "wandb/wandb#5573"


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(225))


def build():
    torch.manual_seed(325)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
        again(x).pow(2).mean().backward()
        loss.backward()
        assert torch.equal(again[0].weight.grad, m[0].weight.grad)
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    first = linear(data().double(), w, "0")
    last = linear(torch.tanh(first), w, "2")
    loss = last.pow(2).mean()
    return {"params": params(loss, w), "modules": modules(loss, {"0": first, "2": last}), "loss": loss}


EXPECT = {
    "calls": {"0": 1, "1": 1, "2": 1},
    "behaviour": {"must_not_raise": True, "hooks_left_behind": 0},
    "params": {
        "0.weight": {"grad_norm": 0.127026141},
        "0.bias": {"grad_norm": 0.0408071833},
        "2.weight": {"grad_norm": 0.162552914},
        "2.bias": {"grad_norm": 0.0904260909},
    },
    "modules": {
        "0": {"calls": 1, "act_var": [0.875330471], "out_grad_norms": [0.0565784316]},
        "2": {"calls": 1, "act_var": [0.0187663097], "out_grad_norms": [0.117786613]},
    },
    "loss": 0.0208105292,
}
