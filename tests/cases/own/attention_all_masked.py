"""Attention in which one sample is padding only: its softmax is over nothing, and it is left out of the loss.

Source: pytorch/pytorch#41508
Gist: the rows of the padded sample are NaN and never used, yet 0 * NaN in backward makes the gradient of the shared
    value projection NaN for the whole batch; the loss is finite.
Expectation: the first module with NaN is the softmax, in the forward pass; not the loss, not the projection, which
    only passes it on or receives it.
"""

import torch
from reference import double, linear, params, variance
from torch import nn

KIND = "nan"
SOURCE = "pytorch/pytorch#41508"
D = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.soft, self.head = nn.Softmax(-1), nn.Linear(D, 1)

    def forward(self, x, padding):
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        mixed = self.soft(scores.masked_fill(padding[:, None, :], float("-inf"))) @ self.v(x)
        return self.head(mixed).squeeze(-1)[~padding]


def data():
    x = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(229))
    return x, torch.tensor([[False, False, True], [True, True, True]])


def build():
    torch.manual_seed(329)
    model, (x, padding) = Net(), data()

    def step(m):
        m.zero_grad()
        loss = m(x, padding).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w, (x, padding) = double(build()[0]), data()
    x = x.double()
    scores = linear(x, w, "q") @ linear(x, w, "k").transpose(-1, -2)
    kept = torch.softmax(scores[0].masked_fill(padding[0][None], float("-inf")), -1) @ linear(x[0], w, "v")
    loss = linear(kept, w, "head").squeeze(-1)[~padding[0]].pow(2).mean()
    nan = float("nan")
    valid = params(loss, {name: w[name] for name in ("q.weight", "k.weight", "head.bias")})
    return {
        "params": valid | {"v.weight": {"grad_norm": nan}, "head.weight": {"grad_norm": nan}},
        "modules": {"q": {"act_var": [variance(linear(x, w, "q"))]}, "soft": {"act_var": [nan]}},
        "evidence": {"outputs/nonfinite_count soft": 9.0, "outputs/nonfinite_count q": 0.0},
        "loss": loss,
    }


EXPECT = {
    "diagnosis": {
        "label": "nonfinite_forward",
        "first_bad": "soft",
        "not_first_bad": ["head", "q", "k", "v"],
        "forward_finite": False,
        "not": ["vanishing", "exploding"],
    },
    "params": {
        "q.weight": {"grad_norm": 0.00459067221},
        "k.weight": {"grad_norm": 0.0106231125},
        "head.bias": {"grad_norm": 0.0277716196},
        "v.weight": {"grad_norm": "nan"},
        "head.weight": {"grad_norm": "nan"},
    },
    "modules": {"q": {"act_var": [0.704580836]}, "soft": {"act_var": ["nan"]}},
    "evidence": {"outputs/nonfinite_count soft": 9.0, "outputs/nonfinite_count q": 0.0},
    "loss": 0.00144952685,
}
