"""A critic is frozen while the generator learns from it, and trains in the second half of the same step.

Source: tianweiy/DMD2#75
Gist: requires_grad_(False) is not no_grad(): the gradient passes through the frozen critic to the generator.
    Recorders that look at requires_grad once either lose the critic's own gradient or call the path through it cut.
Expectation: the generator's gradient from the first pass, the critic's from the second, both calls of the critic.
"""

import torch
from reference import double, linear, norms, params
from torch import nn

KIND = "frozen"
SOURCE = "tianweiy/DMD2#75"


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.make, self.judge = nn.Linear(3, 4), nn.Linear(4, 1)


def data():
    generator = torch.Generator().manual_seed(219)
    return torch.randn(5, 3, generator=generator), torch.randn(5, 4, generator=generator)


def build():
    torch.manual_seed(319)
    model, (z, real) = Pair(), data()

    def step(m):
        m.zero_grad()
        m.judge.requires_grad_(requires_grad=False)
        fooled = -m.judge(torch.tanh(m.make(z))).mean()
        fooled.backward()
        m.judge.requires_grad_(requires_grad=True)
        judged = (m.judge(real) - 1).pow(2).mean()
        judged.backward()
        return judged.item()

    return model, step


def oracle():
    w = double(build()[0])
    z, real = (t.double() for t in data())
    made = linear(z, w, "make")
    verdict, second = linear(torch.tanh(made), w, "judge"), linear(real, w, "judge")
    fooled, judged = -verdict.mean(), (second - 1).pow(2).mean()
    judge = {"calls": 2, "out_grad_norms": [norms(fooled, {"v": verdict})["v"], norms(judged, {"v": second})["v"]]}
    own = {name: w[name] for name in ("judge.weight", "judge.bias")}
    theirs = {name: w[name] for name in ("make.weight", "make.bias")}
    make = {"calls": 1, "out_grad_norms": [norms(fooled, {"m": made})["m"]]}
    return {"params": params(fooled, theirs) | params(judged, own), "modules": {"judge": judge, "make": make}}


EXPECT = {
    "calls_per_step": {"judge": 2, "make": 1},
    "diagnosis": {"not": ["frozen", "disconnected", "vanishing"]},
    "params": {
        "make.weight": {"grad_norm": 0.389414536},
        "make.bias": {"grad_norm": 0.442180578},
        "judge.weight": {"grad_norm": 2.54595726},
        "judge.bias": {"grad_norm": 1.82920943},
    },
    "modules": {
        "judge": {"calls": 2, "out_grad_norms": [0.447213595, 0.930032091]},
        "make": {"calls": 1, "out_grad_norms": [0.208134956]},
    },
}
