"""A module that returns an ordered mapping with attributes, as model libraries do.

Source: huggingface/transformers#36508
Gist: "For backward hooks to be called, module output should be a Tensor or a tuple of Tensors": the hook never runs
    for an output object, with a warning at best.
Expectation: every floating leaf has its own gradient under its own name; the object reaches the caller as it is.
"""

from collections import OrderedDict

import torch
from reference import double, linear, norms, params
from torch import nn

KIND = "io-structure"
SOURCE = "huggingface/transformers#36508"


class Output(OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pool = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        pooled = torch.tanh(self.pool(hidden.mean(1)))
        return Output(last_hidden_state=hidden, pooler_output=pooled, lengths=torch.tensor([3, 2]), cache=None)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(4, 1)

    def forward(self, x):
        out = self.encoder(x)
        assert type(out) is Output
        assert list(out) == ["last_hidden_state", "pooler_output", "lengths", "cache"]
        return self.head(out.last_hidden_state), out.pooler_output


def data():
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(223))


def build():
    torch.manual_seed(323)
    model, x = Net(), data()

    def step(m):
        m.zero_grad()
        tokens, pooled = m(x)
        loss = tokens.pow(2).mean() + pooled.sum() / 10
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    w = double(build()[0])
    hidden = torch.tanh(linear(data().double(), w, "encoder.body"))
    pooled = torch.tanh(linear(hidden.mean(1), w, "encoder.pool"))
    loss = linear(hidden, w, "head").pow(2).mean() + pooled.sum() / 10
    leaves = norms(loss, {"last_hidden_state": hidden, "pooler_output": pooled})
    return {"params": params(loss, w), "modules": {"encoder": {"calls": 1, "leaf_grad_norms": [leaves]}}, "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "model_output_unchanged": True},
    "params": {
        "encoder.body.weight": {"grad_norm": 0.891851011},
        "encoder.body.bias": {"grad_norm": 0.730058438},
        "encoder.pool.weight": {"grad_norm": 0.3040136},
        "encoder.pool.bias": {"grad_norm": 0.365943579},
        "head.weight": {"grad_norm": 1.41068031},
        "head.bias": {"grad_norm": 1.58452567},
    },
    "modules": {
        "encoder": {"calls": 1, "leaf_grad_norms": [{"last_hidden_state": 0.435182681, "pooler_output": 0.282842712}]}
    },
    "loss": 0.584227173,
}
