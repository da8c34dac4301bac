"""Models no layer of whose body gets a gradient: it is exactly 0 there, or never arrives."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


class Unit(nn.Module):
    """A sound Pre-LN unit."""

    def __init__(self, width=40):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 80), nn.Linear(80, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def body(depth=8, outputs=5):
    """A sound network of residual units."""
    return nn.Sequential(nn.Linear(24, 40), *[Unit() for _ in range(depth)], nn.Linear(40, outputs))


class Writes(nn.Module):
    """A writer whose most likely tokens, not their chances, are what the judge reads."""

    def __init__(self, how):
        super().__init__()
        self.writer, self.table, self.how = body(outputs=12), nn.Embedding(12, 40), how
        self.judge = nn.Sequential(nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 5))

    def forward(self, x):
        token = self.writer(x).argmax(-1)
        read = self.table(token) if self.how == "index" else F.one_hot(token, 12).float() @ self.table.weight
        return self.judge(read)


@label(
    "dead",
    family="chosen token {how}",
    variants=({"how": "index"}, {"how": "one-hot"}),
    findings={"disconnected": S.under("writer")},
)
def judge_that_reads_the_chosen_token(seed, how):
    """The writer's 8 units choose a token by argmax, the judge looks it up: integers carry no gradient, and no
    straight-through or policy gradient stands in. The writer gets none, table and judge learn. Measured: index:
    output gradients 0.0014 at judge.0 and 0.012 at judge.2 (of 3), parameters' 0.35 and 0.36; 52 of 57 parameters
    get no gradient; loss 1.58 -> 1.24 in 30 steps of Adam. one-hot: output gradients 0.0014 at judge.0 and 0.012 at
    judge.2 (of 3), parameters' 0.35 and 0.36; 52 of 57 parameters get no gradient; loss 1.58 -> 1.24 in 30 steps of
    Adam."""
    return once(Writes(how), S.vectors(seed), S.cross_entropy)


@label("dead", family="full units")
def units_above_six_for_good(seed):
    """10 layers of ReLU6 with a bias of 50: every unit stays at 6, where the slope is 0; the head alone learns.
    Measured: 22 of 24 parameters get exactly 0; loss 8.72 -> 1.75 in 30 steps of Adam."""
    layers = [nn.Sequential(nn.Linear(40, 40), nn.ReLU6()) for _ in range(10)]
    for layer in layers:
        nn.init.constant_(layer[0].bias, 50.0)
    return once(nn.Sequential(nn.Linear(24, 40), *layers, nn.Linear(40, 5)), S.vectors(seed), S.cross_entropy)


@label("dead", family="floor")
def loss_below_its_floor(seed):
    """A floor of 5 under the loss, free bits in the wrong unit: at 1.6 the clamp is flat and all gradients are
    exactly 0, on each of 3 steps. Measured: 52 of 52 parameters get exactly 0; loss 5."""
    model, batch = body(), S.vectors(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch).clamp(min=5.0), steps=3, optimizer=optimizer)


class Codes(nn.Module):
    """A convolutional encoder, the nearest code of a table for each place, a decoder."""

    def __init__(self, width=16):
        super().__init__()
        layers = [
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.SiLU()) for _ in range(6)
        ]
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 4, 4), *layers)
        self.codes = nn.Embedding(32, width)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, width, 4, 4), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        nearest = (z[..., None, :] - self.codes.weight).square().sum(-1).argmin(-1)
        return self.decoder(self.codes(nearest).permute(0, 3, 1, 2))


@label("dead", family="codebook", findings={"disconnected": S.under("encoder")})
def codebook_without_its_way_back(seed):
    """A VQ-VAE that forgot both the straight-through gradient and the commitment: codes and decoder learn, none of
    seven convolutions of the encoder gets a gradient. Measured: output gradients 5.6e-05 at decoder.0 and 0.00045
    at decoder.2 (of 3), parameters' 0.089 and 0.32; 26 of 31 parameters get no gradient; loss 1.05 -> 0.951 in 30
    steps of Adam."""
    pictures, _ = S.images(seed)
    return once(Codes(), (pictures, pictures), S.squares)


@label("dead", family="advantage")
def advantage_of_equal_rewards(seed):
    """REINFORCE with rewards less their mean, where all rewards are 1: each advantage is 0, all gradients are
    exactly 0, on each of 3 steps. Measured: 52 of 52 parameters get exactly 0; loss -0."""
    model, (x, actions) = body(), S.vectors(seed)
    rewards = torch.ones(32)
    advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(_):
        chances = model(x).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        return -(advantage * chances).mean()

    return fit(model, loss, steps=3, optimizer=optimizer)


@label("dead", family="alone")
def contrast_without_another(seed):
    """A contrastive loss on a batch of one, the last of an epoch: the softmax is over the one right pair and always
    1. Measured: 52 of 52 parameters get exactly 0; loss 0 -> 0 in 30 steps of Adam."""
    model, (x, _) = body(outputs=16), S.vectors(seed, batch=1)

    def loss(output, batch):
        other = F.normalize(model(batch[0] + 0.1), dim=-1)
        return F.cross_entropy(F.normalize(output, dim=-1) @ other.mT / 0.1, torch.zeros(1, dtype=torch.long))

    return once(model, (x, torch.zeros(1)), loss)


@label("dead", family="pruned")
def everything_pruned(seed):
    """Magnitude pruning by a share of 1.0, where 1 % was meant, in 10 tanh layers: masks of 0 stand before every
    weight, and only the bias of the head learns, on each of 3 steps. Measured: 23 of 24 parameters get exactly 0;
    loss 1.61 -> 1.6."""
    layers = [nn.Sequential(nn.Linear(40, 40), nn.Tanh()) for _ in range(10)]
    model = nn.Sequential(nn.Linear(24, 40), *layers, nn.Linear(40, 5))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", amount=1.0)
    batch, optimizer = S.vectors(seed), torch.optim.SGD(model.parameters(), lr=0.1)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch), steps=3, optimizer=optimizer)


@label("dead", family="rank by order")
def loss_of_sorted_positions(seed):
    """A rank correlation computed with argsort of argsort and made differentiable by adding 0 times the scores: the
    ranks are integers, all gradients are exactly 0. Measured: 52 of 52 parameters get exactly 0; loss 283 -> 283 in
    30 steps of Adam."""

    def loss(output, batch):
        ranks = output[:, 0].argsort().argsort().float() + 0.0 * output[:, 0]
        return (ranks - batch[-1].float()).square().mean()

    return once(body(), S.vectors(seed), loss)
