"""A residual written as x += f(x), where f ends in a Linear with bias on [batch, position, feature].

Source: shap/shap#3565
Gist: backward hooks raise on `x += shortcut`, and not only on ReLU(inplace=True); the Linear's output is a view of a
    matrix product, and adding into it moves a hook on the view out of the graph.
Expectation: nothing raises; the branch has the gradient of what it put out before the addition.
"""

import torch
from reference import double, linear, modules, params
from torch import nn

KIND = "inplace"
SOURCE = "shap/shap#3565"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        y = self.outer(torch.tanh(self.inner(x)))
        y += x
        return y


def data():
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(220))


def build():
    torch.manual_seed(320)
    model, x = nn.Sequential(Block(), Block(), nn.Linear(4, 1)), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w, h, outputs = double(build()[0]), data().double(), {}
    for i in range(2):
        inner = outputs[f"{i}.inner"] = linear(h, w, f"{i}.inner")
        outer = outputs[f"{i}.outer"] = linear(torch.tanh(inner), w, f"{i}.outer")
        h = outputs[str(i)] = outer + h
    loss = linear(h, w, "2").pow(2).mean()
    return {"params": params(loss, w), "modules": modules(loss, outputs), "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "model_output_unchanged": True, "hooks_left_behind": 0},
    "params": {
        "0.inner.weight": {"grad_norm": 0.450146709},
        "0.inner.bias": {"grad_norm": 0.23336192},
        "0.outer.weight": {"grad_norm": 0.518593307},
        "0.outer.bias": {"grad_norm": 0.495025385},
        "1.inner.weight": {"grad_norm": 0.40831809},
        "1.inner.bias": {"grad_norm": 0.221735252},
        "1.outer.weight": {"grad_norm": 0.548771399},
        "1.outer.bias": {"grad_norm": 0.431118482},
        "2.weight": {"grad_norm": 1.72226608},
        "2.bias": {"grad_norm": 0.728009423},
    },
    "modules": {
        "0.inner": {"calls": 1, "act_var": [0.316714632], "out_grad_norms": [0.122339995]},
        "0.outer": {"calls": 1, "act_var": [0.17649097], "out_grad_norms": [0.260879065]},
        "0": {"calls": 1, "act_var": [1.05459758], "out_grad_norms": [0.260879065]},
        "1.inner": {"calls": 1, "act_var": [0.351670482], "out_grad_norms": [0.12094375]},
        "1.outer": {"calls": 1, "act_var": [0.0988477386], "out_grad_norms": [0.225424551]},
        "1": {"calls": 1, "act_var": [1.30999065], "out_grad_norms": [0.225424551]},
    },
    "loss": 0.543393466,
}
