"""RMSNorm on rows of zeros: the Jacobian is the gain over the root of epsilon, not 0 and not infinite.

Source: Dao-AILab/flash-attention#781
Gist: a weight gradient of 316 for an all-zero input looks like a defect, and differs between implementations; it is
    1/sqrt(eps).
Expectation: gain and largest singular value in closed form, J = diag(g)/s (I - x x'/(n s^2)), s^2 = mean(x^2) + eps.
"""

import torch
from reference import double, norms, params
from torch import nn

KIND = "ln-jacobian"
SOURCE = "Dao-AILab/flash-attention#781"


def data():
    x = torch.zeros(3, 4)
    x[2] = torch.tensor([1.0, -2.0, 0.5, 3.0])
    return x


def build():
    torch.manual_seed(327)
    model, x = nn.Sequential(nn.Linear(4, 4, bias=False), nn.RMSNorm(4, eps=1e-5), nn.Linear(4, 1)), data()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[1].weight.copy_(torch.tensor([1.0, 2.0, -0.5, 1.5]))

    def step(m):
        m.zero_grad()
        loss = (m(x) - 1).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    x = data().double() @ w["0.weight"].T
    s = (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    y = x / s * w["1.weight"]
    loss = (y @ w["2.weight"].T + w["2.bias"] - 1).pow(2).mean()
    gains, sigmas = [], []
    for row, scale in zip(x.detach(), s.detach(), strict=True):
        z = row / scale
        jacobian = torch.diag(w["1.weight"].detach()) / scale @ (torch.eye(4).double() - torch.outer(z, z) / 4)
        gains.append(jacobian.pow(2).sum() / 4)
        sigmas.append(torch.linalg.matrix_norm(jacobian, 2))
    drop = norms(loss, {"0": x, "1": y})
    evidence = {
        "norms/jacobian_gain 1": torch.stack(gains).mean().sqrt(),
        "norms/sigma_max_exact 1": max(sigmas),
        "0 / 1": drop["0"] / drop["1"],
    }
    return {"params": params(loss, w), "evidence": evidence, "loss": loss}


EXPECT = {
    "ln_module": "1",
    "diagnosis": {"not": ["norm_kills_gradient", "nonfinite"]},
    "params": {
        "0.weight": {"grad_norm": 0.274284219},
        "1.weight": {"grad_norm": 0.142872257},
        "2.weight": {"grad_norm": 0.908658216},
        "2.bias": {"grad_norm": 0.964499066},
    },
    "evidence": {"norms/jacobian_gain 1": 353.553552, "norms/sigma_max_exact 1": 632.455532, "0 / 1": 473.324771},
    "loss": 0.640635125,
}
