"""Two attempts overflow before the scale fits: the step that counts is the third, in units of the loss.

Source: facebookresearch/maskrcnn-benchmark#1034
Gist: "gradient overflow, skipping step" again and again at the start of mixed-precision training; is that normal? A
    logger that keeps what backward left in .grad shows Inf, and calls a healthy model broken.
Expectation: one row, the unscaled gradients of the attempt that stepped; skipped attempts are said, not-finite is
    not.
"""

import torch
from reference import double, linear, params, total
from torch import nn

KIND = "amp"
SOURCE = "facebookresearch/maskrcnn-benchmark#1034"


def data():
    return 4.0 * torch.randn(6, 4, generator=torch.Generator().manual_seed(201))


def build():
    torch.manual_seed(301)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**128 * 0.999)

    def step(m):
        while True:
            optimizer.zero_grad()
            loss = (m(x) - 3).pow(2).mean()
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                return loss.item()

    step.optimizer, step.scaler = optimizer, scaler
    return model, step


def oracle():
    w = double(build()[0])
    loss = (linear(torch.tanh(linear(data().double(), w, "0")), w, "2") - 3).pow(2).mean()
    return {"params": params(loss, w), "total_grad_norm": total(loss, w), "loss": loss}


EXPECT = {
    "diagnosis": {"label": "overflow_step_skipped", "not": ["nonfinite", "exploding", "vanishing"]},
    "params": {
        "0.weight": {"grad_norm": 4.81238063},
        "0.bias": {"grad_norm": 1.01050048},
        "2.weight": {"grad_norm": 6.44564122},
        "2.bias": {"grad_norm": 5.55353958},
    },
    "total_grad_norm": 9.82691259,
    "loss": 7.72657873,
}
