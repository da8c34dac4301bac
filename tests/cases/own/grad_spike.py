"""One bad batch after a dozen ordinary ones: the total norm of that step is a thousand times the others.

Source: facebookresearch/metaquery#6
Gist: training stops with "grad norm spiked" and nobody can tell which step, by how much against what, and in which
    layer.
Expectation: a spike, at the step and with the parameter that made most of it; the other steps are healthy.
"""

import torch
from reference import double, linear, params, total
from torch import nn

KIND = "diagnosis"
SOURCE = "facebookresearch/metaquery#6"
N_STEPS = 14
BAD = 12


def data(k):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2090 + k))
    return 300.0 * x if k == BAD else x


def build():
    torch.manual_seed(309)
    model, done = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1)), []

    def step(m):
        m.zero_grad()
        loss = (m(data(len(done) % N_STEPS)) - 1).pow(2).mean()
        loss.backward()
        done.append(1)
        return loss.item()

    return model, step


def oracle():
    w, steps = double(build()[0]), []
    for k in range(N_STEPS):
        loss = (linear(torch.relu(linear(data(k).double(), w, "0")), w, "2") - 1).pow(2).mean()
        steps.append({"params": params(loss, w), "total_grad_norm": total(loss, w)})
    return {"steps": steps}


EXPECT = {
    "diagnosis": {"label": "spike", "where": "2.weight", "not": ["exploding", "nonfinite"]},
    "steps": [
        {
            "params": {
                "0.weight": {"grad_norm": 0.201150136},
                "0.bias": {"grad_norm": 0.209802709},
                "2.weight": {"grad_norm": 0.820767464},
                "2.bias": {"grad_norm": 1.32194847},
            },
            "total_grad_norm": 1.58293574,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.233926452},
                "0.bias": {"grad_norm": 0.195981259},
                "2.weight": {"grad_norm": 0.766377136},
                "2.bias": {"grad_norm": 1.31657523},
            },
            "total_grad_norm": 1.55365198,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.300916274},
                "0.bias": {"grad_norm": 0.33653955},
                "2.weight": {"grad_norm": 0.899120899},
                "2.bias": {"grad_norm": 1.36175336},
            },
            "total_grad_norm": 1.69310368,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.465895326},
                "0.bias": {"grad_norm": 0.270579547},
                "2.weight": {"grad_norm": 0.882335601},
                "2.bias": {"grad_norm": 1.32038269},
            },
            "total_grad_norm": 1.67696104,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.286073326},
                "0.bias": {"grad_norm": 0.245269066},
                "2.weight": {"grad_norm": 0.932677075},
                "2.bias": {"grad_norm": 1.29664102},
            },
            "total_grad_norm": 1.6410848,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.428245602},
                "0.bias": {"grad_norm": 0.297650088},
                "2.weight": {"grad_norm": 0.92797351},
                "2.bias": {"grad_norm": 1.46132543},
            },
            "total_grad_norm": 1.80792608,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.362449227},
                "0.bias": {"grad_norm": 0.284378828},
                "2.weight": {"grad_norm": 0.87590481},
                "2.bias": {"grad_norm": 1.37504288},
            },
            "total_grad_norm": 1.69416437,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.295096645},
                "0.bias": {"grad_norm": 0.224212278},
                "2.weight": {"grad_norm": 0.888538425},
                "2.bias": {"grad_norm": 1.2644711},
            },
            "total_grad_norm": 1.58925796,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.410039309},
                "0.bias": {"grad_norm": 0.315484069},
                "2.weight": {"grad_norm": 0.92947188},
                "2.bias": {"grad_norm": 1.34726089},
            },
            "total_grad_norm": 1.71659323,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.420810097},
                "0.bias": {"grad_norm": 0.292413811},
                "2.weight": {"grad_norm": 0.905296921},
                "2.bias": {"grad_norm": 1.35232389},
            },
            "total_grad_norm": 1.7061446,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.322920789},
                "0.bias": {"grad_norm": 0.227069625},
                "2.weight": {"grad_norm": 0.87250539},
                "2.bias": {"grad_norm": 1.28233157},
            },
            "total_grad_norm": 1.60046192,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.48973332},
                "0.bias": {"grad_norm": 0.345445621},
                "2.weight": {"grad_norm": 1.03435358},
                "2.bias": {"grad_norm": 1.47515546},
            },
            "total_grad_norm": 1.89872124,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 21209.9957},
                "0.bias": {"grad_norm": 38.0097356},
                "2.weight": {"grad_norm": 29335.7024},
                "2.bias": {"grad_norm": 128.980847},
            },
            "total_grad_norm": 36200.3513,
        },
        {
            "params": {
                "0.weight": {"grad_norm": 0.522655148},
                "0.bias": {"grad_norm": 0.388899346},
                "2.weight": {"grad_norm": 1.10764637},
                "2.bias": {"grad_norm": 1.54693918},
            },
            "total_grad_norm": 2.0110476,
        },
    ],
}
