"""Fused AdamW after an explicit unscale_ and clipping: the scale is out already, and not to be taken out twice.

Source: pytorch/pytorch#94060
Gist: a fused optimizer gets the scale handed over and divides by itself, unless unscale_ ran before. Loggers that
    divide by the scale whenever they see one are off by 65536, those that never do by as much in the other case.
Expectation: gradients in units of the loss, before clipping.
"""

import torch
from reference import double, linear, params, total
from torch import nn

KIND = "amp"
SOURCE = "pytorch/pytorch#94060"


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(202))


def build():
    torch.manual_seed(302)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def step(m):
        optimizer.zero_grad()
        loss = (m(x) - 3).pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(m.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    step.optimizer, step.scaler = optimizer, scaler
    return model, step


def oracle():
    w = double(build()[0])
    loss = (linear(torch.tanh(linear(data().double(), w, "0")), w, "2") - 3).pow(2).mean()
    found = {"params": params(loss, w), "total_grad_norm": total(loss, w), "loss": loss}
    return found | {"evidence": {"raw_over_true": 65536.0}}


EXPECT = {
    "scale": 65536.0,
    "diagnosis": {"label": "healthy", "not": ["exploding", "overflow_step_skipped"]},
    "params": {
        "0.weight": {"grad_norm": 1.40757762},
        "0.bias": {"grad_norm": 2.89200357},
        "2.weight": {"grad_norm": 2.95017337},
        "2.bias": {"grad_norm": 5.69611309},
    },
    "total_grad_norm": 7.175945,
    "loss": 8.14950173,
    "evidence": {"raw_over_true": 65536.0},
}
