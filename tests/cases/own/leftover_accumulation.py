"""Three micro-batches, accumulation over two: the third has a gradient that no step ever uses.

Source: timoschick/pet#36
Gist: updates happen where the batch number divides, so that the last gradients of an epoch are lost, or leak into the
    first step of the next.
Expectation: the row of a step holds the two batches it was made of, in both epochs; the third batch is in neither.
"""

import torch
from reference import double, linear, norms, params
from torch import nn

KIND = "training-loop"
SOURCE = "timoschick/pet#36"
N_STEPS = 2


def data():
    return torch.randn(9, 4, generator=torch.Generator().manual_seed(239))


def build():
    torch.manual_seed(339)
    model, batches = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)), data().chunk(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(m):
        optimizer.zero_grad()
        for k, x in enumerate(batches):
            loss = (m(x) - 1).pow(2).mean() / 2
            loss.backward()
            if k == 1:
                optimizer.step()
                optimizer.zero_grad()
        return loss.item()

    step.optimizer = optimizer
    return model, step


def oracle():
    w = double(build()[0])
    outs = [linear(torch.tanh(linear(x, w, "0")), w, "2") for x in data().double().chunk(3)]
    losses = [(out - 1).pow(2).mean() / 2 for out in outs]
    found = params(losses[0] + losses[1], w)
    found["0.weight"]["per_backward"] = [norms(loss, {"w": w["0.weight"]})["w"] for loss in losses[:2]]
    return {"steps": [{"params": found, "modules": {"0": {"calls": 2}}, "loss": losses[2]}] * 2}


EXPECT = {
    "backwards_per_step": 2,
    "behaviour": {"bit_identical_training": True, "must_not_raise": True},
    "steps": [
        {
            "params": {
                "0.weight": {"grad_norm": 0.529461387, "per_backward": [0.423180554, 0.397257036]},
                "0.bias": {"grad_norm": 0.521345688},
                "2.weight": {"grad_norm": 1.31716525},
                "2.bias": {"grad_norm": 1.29496171},
            },
            "modules": {"0": {"calls": 2}},
            "loss": 0.272789056,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.529461387, "per_backward": [0.423180554, 0.397257036]},
                "0.bias": {"grad_norm": 0.521345688},
                "2.weight": {"grad_norm": 1.31716525},
                "2.bias": {"grad_norm": 1.29496171},
            },
            "modules": {"0": {"calls": 2}},
            "loss": 0.272789056,
        },
    ],
}
