"""A frozen encoder in eval mode with gradients enabled: nothing in it requires one, so the fast path is taken.

Source: pytorch/pytorch#86120
Gist: the fast path depends on eval mode and on whether anything requires a gradient, not on no_grad(): features for a
    trainable head take another path than in training, and a padding mask is handled differently there.
Expectation: the head's gradients from the encoder's features; the encoder frozen, not vanishing; values as without a
    watch.
"""

import torch
from reference import double, linear, params
from torch import nn

KIND = "transformer-fastpath"
SOURCE = "pytorch/pytorch#86120"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 1)

    def forward(self, x, padding):
        return self.head(self.encoder(x, src_key_padding_mask=padding))[~padding]


def data():
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(242))
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    return x, padding


def build():
    torch.manual_seed(342)
    model, (x, padding) = Net(), data()
    model.encoder.eval().requires_grad_(requires_grad=False)

    def step(m):
        m.zero_grad()
        loss = m(x, padding).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    model, _ = build()
    w, (x, padding) = double(model), data()
    x = x.double()
    for i in range(2):
        at = f"encoder.layers.{i}"
        q, k, v = (x @ w[f"{at}.self_attn.in_proj_weight"].T + w[f"{at}.self_attn.in_proj_bias"]).chunk(3, -1)
        q, k, v = (t.reshape(2, 5, 2, 8).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(padding[:, None, None, :], float("-inf"))
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(2, 5, 16)
        x = norm(x + linear(mixed, w, f"{at}.self_attn.out_proj"), w, f"{at}.norm1")
        x = norm(x + linear(torch.relu(linear(x, w, f"{at}.linear1")), w, f"{at}.linear2"), w, f"{at}.norm2")
    loss = linear(x.detach(), w, "head")[~padding].pow(2).mean()
    head = {name: w[name] for name in ("head.weight", "head.bias")}
    frozen = {"encoder.layers.0.linear1.weight": {"grad_norm": None}}
    return {
        "params": params(loss, head) | frozen,
        "modules": {"encoder": {"calls": 1}, "head": {"calls": 1}},
        "loss": loss,
    }


def norm(x, w, name):
    spread = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return (x - x.mean(-1, keepdim=True)) / spread * w[f"{name}.weight"] + w[f"{name}.bias"]


EXPECT = {
    "behaviour": {"must_not_raise": True, "loss_atol": 1e-05, "children": "real statistics or explicit 'not observed'"},
    "diagnosis": {"per_module": {"encoder": "frozen", "head": "healthy"}, "not": ["vanishing", "disconnected"]},
    "params": {
        "head.weight": {"grad_norm": 1.94364857},
        "head.bias": {"grad_norm": 0.089965335},
        "encoder.layers.0.linear1.weight": {"grad_norm": None},
    },
    "modules": {"encoder": {"calls": 1}, "head": {"calls": 1}},
    "loss": 0.196015384,
}
