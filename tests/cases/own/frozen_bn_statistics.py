"""A frozen convolution before a BatchNorm in eval mode whose scale and shift still train.

Source: pgniewko/gt-pyg#112
Gist: freezing sets requires_grad and eval(); model.train() puts BatchNorm back, and running statistics drift although
    everything is called frozen. A tool that runs the model, or flips modes, does the same.
Expectation: the convolution is frozen, the norm trains, its running statistics and its mode stay as they are.
"""

import torch
from reference import double, params
from torch import nn

KIND = "frozen"
SOURCE = "pgniewko/gt-pyg#112"
N_STEPS = 2


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(218))


def build():
    torch.manual_seed(318)
    model, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), data()
    model[0].requires_grad_(requires_grad=False)
    model[1].running_mean.copy_(torch.tensor([0.5, -1.0, 0.25]))
    model[1].running_var.copy_(torch.tensor([2.0, 0.5, 1.0]))
    model[1].eval()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    mean, var = torch.tensor([0.5, -1.0, 0.25]).double(), torch.tensor([2.0, 0.5, 1.0]).double()
    z = (data().double() @ w["0.weight"].detach().T + w["0.bias"].detach() - mean) / (var + 1e-5).sqrt()
    loss = ((z * w["1.weight"] + w["1.bias"]) @ w["2.weight"].T + w["2.bias"]).pow(2).mean()
    buffers = {"1.running_mean": mean.sum(), "1.running_var": var.sum(), "1.num_batches_tracked": 0.0}
    return {"steps": [{"params": params(loss, w), "loss": loss}] * 2, "buffers": buffers}


EXPECT = {
    "behaviour": {"bit_identical_training": True, "training_flag_unchanged": True},
    "diagnosis": {"per_module": {"0": "frozen", "1": "healthy", "2": "healthy"}, "not": ["vanishing", "disconnected"]},
    "steps": [
        {
            "params": {
                "0.weight": {"grad_norm": None},
                "0.bias": {"grad_norm": None},
                "1.weight": {"grad_norm": 1.05706182},
                "1.bias": {"grad_norm": 1.20968711},
                "2.weight": {"grad_norm": 1.94467416},
                "2.bias": {"grad_norm": 1.64586423},
            },
            "loss": 0.866716179,
        },
        {
            "params": {
                "0.weight": {"grad_norm": None},
                "0.bias": {"grad_norm": None},
                "1.weight": {"grad_norm": 1.05706182},
                "1.bias": {"grad_norm": 1.20968711},
                "2.weight": {"grad_norm": 1.94467416},
                "2.bias": {"grad_norm": 1.64586423},
            },
            "loss": 0.866716179,
        },
    ],
    "buffers": {"1.running_mean": -0.25, "1.running_var": 3.5, "1.num_batches_tracked": 0.0},
}
