"""Names that differ in blanks, brackets and dashes only.

Source: lanpa/tensorboardX#696
Gist: a writer turns everything that is not alphanumeric into underscores, so that several curves end up under one
    name.
Expectation: after a round trip through the file every name has its own gradient.
"""

import torch
from reference import double, linear, norms
from torch import nn

KIND = "files"
SOURCE = "lanpa/tensorboardX#696"
NAMES = ("a b", "a_b", "a-b", "a(b)", "a  b", "a:b", "A_B")


def data():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(216))


def build():
    torch.manual_seed(316)
    model, x = nn.ModuleDict({name: nn.Linear(3, 1, bias=False) for name in NAMES}), data()

    def step(m):
        m.zero_grad()
        loss = sum((k + 1) * m[name](x).pow(2).mean() for k, name in enumerate(NAMES))
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    loss = sum((k + 1) * linear(data().double(), w, name).pow(2).mean() for k, name in enumerate(NAMES))
    return {"params": {name: {"grad_norm": norm} for name, norm in norms(loss, w).items()}, "loss": loss}


EXPECT = {
    "names": ["a b.weight", "a_b.weight", "a-b.weight", "a(b).weight", "a  b.weight", "a:b.weight", "A_B.weight"],
    "behaviour": {"must_not_raise": True, "roundtrip_exact": True},
    "params": {
        "a b.weight": {"grad_norm": 0.845006345},
        "a_b.weight": {"grad_norm": 1.65111472},
        "a-b.weight": {"grad_norm": 2.0269612},
        "a(b).weight": {"grad_norm": 3.13021647},
        "a  b.weight": {"grad_norm": 3.61460138},
        "a:b.weight": {"grad_norm": 5.9236724},
        "A_B.weight": {"grad_norm": 3.48470099},
    },
    "loss": 4.84044087,
}
