"""An encoder evaluated with a padding mask that leaves out the last position of every sample.

Source: pytorch/pytorch#97111
Gist: on the fast path the layers get nested tensors, and the output was cut to the longest sample; by now it is
    padded with zeros again. A tool that makes the model leave the fast path may change shape or padding that the
    caller sees.
Expectation: the caller gets what it would get without a watch; layers are called once each, or said to be out of
    sight.
"""

import torch
from torch import nn

KIND = "transformer-fastpath"
SOURCE = "pytorch/pytorch#97111"


def data():
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(241))
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[:, 5] = True
    padding[1, 3:] = True
    return x, padding


def build():
    torch.manual_seed(341)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model, (x, padding) = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval(), data()

    def step(m):
        with torch.no_grad():
            out = m(x, src_key_padding_mask=padding)
            return out.pow(3).mean().item() + out.shape[1]

    return model, step


def oracle():
    """Layer by layer, zeros where it is padded, plus the six positions that come out."""
    model, _ = build()
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    x, padding = data()
    x = x.double()
    for i in range(2):
        at = f"layers.{i}."
        q, k, v = (x @ w[at + "self_attn.in_proj_weight"].T + w[at + "self_attn.in_proj_bias"]).chunk(3, -1)
        q, k, v = (t.reshape(2, 6, 2, 8).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(padding[:, None, None, :], float("-inf"))
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(2, 6, 16)
        mixed = mixed @ w[at + "self_attn.out_proj.weight"].T + w[at + "self_attn.out_proj.bias"]
        x = norm(x + mixed, w[at + "norm1.weight"], w[at + "norm1.bias"])
        inner = torch.relu(x @ w[at + "linear1.weight"].T + w[at + "linear1.bias"])
        x = norm(x + inner @ w[at + "linear2.weight"].T + w[at + "linear2.bias"], w[at + "norm2.weight"], 0.0)
    x = x.masked_fill(padding[..., None], 0.0)
    return {"modules": {"layers.0": {"calls": 1}, "layers.1": {"calls": 1}}, "loss": x.pow(3).mean() + 6.0}


def norm(x, weight, bias):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * weight + bias


EXPECT = {
    "behaviour": {"must_not_raise": True, "loss_atol": 1e-05, "children": "real statistics or explicit 'not observed'"},
    "diagnosis": {"label": "no_backward", "not": ["vanishing", "dead_units", "disconnected"]},
    "modules": {"layers.0": {"calls": 1}, "layers.1": {"calls": 1}},
    "loss": 5.75731655,
}
