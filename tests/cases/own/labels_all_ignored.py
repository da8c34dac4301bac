"""One batch in which every label is ignored: the mean over nothing is NaN, and so is everything after it.

Source: pytorch/pytorch#116349
Gist: cross_entropy with ignore_index over a batch of padding only returns NaN; outputs are finite, and later steps
    are NaN everywhere, which sends people after the model.
Expectation: the loss itself is the first thing that is not finite, at that step; no module is blamed for it.
"""

import torch
from reference import double, linear, params
from torch import nn
from torch.nn import functional as F

KIND = "nan"
SOURCE = "pytorch/pytorch#116349"
N_STEPS = 14
BAD = 11


def data(k):
    generator = torch.Generator().manual_seed(2300 + k)
    x, y = torch.randn(6, 4, generator=generator), torch.randint(0, 3, (6,), generator=generator)
    return x, torch.full_like(y, -100) if k == BAD else y


def build():
    torch.manual_seed(330)
    model, done = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), []

    def step(m):
        x, y = data(len(done) % N_STEPS)
        done.append(1)
        m.zero_grad()
        loss = F.cross_entropy(m(x), y)
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w, steps = double(build()[0]), []
    for k in range(N_STEPS):
        x, y = data(k)
        loss = F.cross_entropy(linear(torch.tanh(linear(x.double(), w, "0")), w, "2"), y)
        steps.append({"params": params(loss, w), "loss": loss} if k != BAD else {"loss": loss})
    return {"steps": steps}


EXPECT = {
    "diagnosis": {"label": "nonfinite_forward", "forward_finite": True, "not_first_bad": ["0", "1", "2"]},
    "steps": [
        {
            "params": {
                "0.weight": {"grad_norm": 0.418676243},
                "0.bias": {"grad_norm": 0.0476657672},
                "2.weight": {"grad_norm": 0.403704379},
                "2.bias": {"grad_norm": 0.142580327},
            },
            "loss": 1.03602499,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.383957801},
                "0.bias": {"grad_norm": 0.0423080444},
                "2.weight": {"grad_norm": 0.392957366},
                "2.bias": {"grad_norm": 0.0793634224},
            },
            "loss": 1.01041219,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.176808694},
                "0.bias": {"grad_norm": 0.220708969},
                "2.weight": {"grad_norm": 0.384810909},
                "2.bias": {"grad_norm": 0.502209906},
            },
            "loss": 1.29085518,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.275468336},
                "0.bias": {"grad_norm": 0.0764668054},
                "2.weight": {"grad_norm": 0.38847312},
                "2.bias": {"grad_norm": 0.106909735},
            },
            "loss": 0.997015822,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.236993304},
                "0.bias": {"grad_norm": 0.116578721},
                "2.weight": {"grad_norm": 0.369212678},
                "2.bias": {"grad_norm": 0.240313434},
            },
            "loss": 1.09002438,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.433241374},
                "0.bias": {"grad_norm": 0.0474899995},
                "2.weight": {"grad_norm": 0.560387434},
                "2.bias": {"grad_norm": 0.142836718},
            },
            "loss": 1.16058948,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.350544452},
                "0.bias": {"grad_norm": 0.179580822},
                "2.weight": {"grad_norm": 0.504673133},
                "2.bias": {"grad_norm": 0.334213988},
            },
            "loss": 1.27928883,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.341965451},
                "0.bias": {"grad_norm": 0.184657372},
                "2.weight": {"grad_norm": 0.444616955},
                "2.bias": {"grad_norm": 0.211651085},
            },
            "loss": 1.13438591,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.188615647},
                "0.bias": {"grad_norm": 0.160574315},
                "2.weight": {"grad_norm": 0.462008359},
                "2.bias": {"grad_norm": 0.271687091},
            },
            "loss": 1.01452655,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.294871731},
                "0.bias": {"grad_norm": 0.0614381317},
                "2.weight": {"grad_norm": 0.281153161},
                "2.bias": {"grad_norm": 0.128899572},
            },
            "loss": 1.05746597,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.274324502},
                "0.bias": {"grad_norm": 0.0320960825},
                "2.weight": {"grad_norm": 0.406032095},
                "2.bias": {"grad_norm": 0.119245711},
            },
            "loss": 1.05589099,
        },
        {"loss": "nan"},
        {
            "params": {
                "0.weight": {"grad_norm": 0.303902755},
                "0.bias": {"grad_norm": 0.0917015503},
                "2.weight": {"grad_norm": 0.216967004},
                "2.bias": {"grad_norm": 0.137155189},
            },
            "loss": 1.14647423,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.348481597},
                "0.bias": {"grad_norm": 0.198411106},
                "2.weight": {"grad_norm": 0.335163172},
                "2.bias": {"grad_norm": 0.262035241},
            },
            "loss": 1.11965743,
        },
    ],
}
