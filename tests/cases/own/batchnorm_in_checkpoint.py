"""BatchNorm inside a checkpointed region: the recomputation updates its running statistics a second time.

Source: facebookresearch/fairscale#1035
Gist: with checkpointing the statistics see every batch twice (or once, in backward only, where it is patched);
    another forward by a tool makes it three times.
Expectation: exactly what torch does by itself: two updates a step, and one call of the module in the record.
"""

import torch
from reference import double, linear
from torch import nn
from torch.utils.checkpoint import checkpoint

KIND = "no-side-effects"
SOURCE = "facebookresearch/fairscale#1035"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh()), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(233))


def build():
    torch.manual_seed(333)
    model, x = Net(), data()

    def step(m):
        m.zero_grad()
        loss = m(x).pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    z = linear(data().double(), double(build()[0]), "body.0").detach()
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    for _ in range(2):
        mean, var = 0.9 * mean + 0.1 * z.mean(0), 0.9 * var + 0.1 * z.var(0)
    found = {"body.1.running_mean": mean.sum(), "body.1.running_var": var.sum(), "body.1.num_batches_tracked": 2.0}
    return {"buffers": found, "modules": {"body.1": {"calls": 1}, "body.0": {"calls": 1}, "head": {"calls": 1}}}


EXPECT = {
    "behaviour": {"bit_identical_training": True, "training_flag_unchanged": True, "hooks_left_behind": 0},
    "buffers": {
        "body.1.running_mean": 0.163397582,
        "body.1.running_var": 2.52523009,
        "body.1.num_batches_tracked": 2.0,
    },
    "modules": {"body.1": {"calls": 1}, "body.0": {"calls": 1}, "head": {"calls": 1}},
}
