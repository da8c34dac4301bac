"""The model is traced for deployment while it is watched, after each step.

Source: wandb/wandb#3148
Gist: watching and TorchScript do not go together: hooks without a name, or that are no functions, make the export
    crash in the middle of a run.
Expectation: tracing works, the traced model gives the same values, and the record knows nothing of it.
"""

import torch
from reference import double, linear, modules, params
from torch import nn

KIND = "lifecycle"
SOURCE = "wandb/wandb#3148"


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(226))


def build():
    torch.manual_seed(326)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            traced = torch.jit.trace(m, x, check_trace=False)
            assert torch.equal(traced(x), m(x))
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    first = linear(data().double(), w, "0")
    last = linear(torch.tanh(first), w, "2")
    loss = last.pow(2).mean()
    gradients = modules(loss, {"0": first, "2": last})
    return {
        "params": params(loss, w),
        "modules": {n: {"out_grad_norms": [*v["out_grad_norms"], None]} for n, v in gradients.items()},
        "loss": loss,
    }


EXPECT = {
    "behaviour": {"must_not_raise": True, "hooks_left_behind": 0, "model_output_unchanged": True},
    "params": {
        "0.weight": {"grad_norm": 0.141138582},
        "0.bias": {"grad_norm": 0.162913911},
        "2.weight": {"grad_norm": 0.55454842},
        "2.bias": {"grad_norm": 0.909386499},
    },
    "modules": {"0": {"out_grad_norms": [0.0693010668, None]}, "2": {"out_grad_norms": [0.378025642, None]}},
    "loss": 0.214355079,
}
