"""One scaler, two optimizers: the gradients of one overflow, so that only the other steps.

Source: pytorch/pytorch#67590
Gist: the scaler skips a step without a word; code that counts steps, or logs norms, takes it that every optimizer
    stepped.
Expectation: nothing raises, training is as without a watch, the body that stepped has its unscaled gradient, and no
    module is said to be broken.
"""

import torch
from reference import double, linear, params
from torch import nn

KIND = "amp"
SOURCE = "pytorch/pytorch#67590"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.aux = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.body(x).pow(2).mean(), self.aux(x).pow(2).mean()


def data():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(203))


def build():
    torch.manual_seed(303)
    model, x = Net(), data()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in (model.body, model.aux)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**110)

    def step(m):
        while True:
            for optimizer in optimizers:
                optimizer.zero_grad()
            main, aux = m(x)
            loss = main + 1e9 * aux
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= before:
                return main.item()

    step.optimizer, step.scaler = optimizers, scaler
    return model, step


def oracle():
    w = double(build()[0])
    loss = linear(data().double(), w, "body").pow(2).mean()
    return {"params": params(loss, {name: w[name] for name in ("body.weight", "body.bias")}), "loss": loss}


EXPECT = {
    "behaviour": {"must_not_raise": True, "bit_identical_training": True},
    "params": {"body.weight": {"grad_norm": 1.0972796}, "body.bias": {"grad_norm": 0.69588582}},
    "loss": 0.666228831,
}
