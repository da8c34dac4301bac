"""Sound plain stacks: the initialisations and shortcuts that were published to make depth work."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit


def linear(a, b, start, **options):
    """A linear layer without bias started in some way."""
    layer = nn.Linear(a, b, bias=False)
    start(layer.weight, **options)
    return layer


@label("healthy", family="orthogonal tanh")
def dynamical_isometry(seed):
    """50 orthogonal tanh layers of width 64 at gain 1.05, small inputs: singular values stay near 1 (Saxe et al.).
    Measured: output gradients 0.004 at 0 and 0.013 at 51 (of 52), parameters' 0.16 and 0.35; loss 1.66 -> 0.0504 in
    30 steps of Adam."""
    layers = [nn.Sequential(linear(64, 64, nn.init.orthogonal_, gain=1.05), nn.Tanh()) for _ in range(50)]
    model = nn.Sequential(linear(24, 64, nn.init.orthogonal_), *layers, nn.Linear(64, 5))
    x, y = S.vectors(seed)
    return once(model, (0.2 * x, y), S.cross_entropy)


@label("healthy", family="selu")
def self_normalising(seed):
    """24 SELU layers with LeCun weights (Klambauer et al.), in float64. Measured: output gradients 0.0079 at 0 and
    0.013 at 25 (of 26), parameters' 2.2 and 1.8; loss 1.75 -> 0.000227 in 30 steps of Adam."""
    layers = [
        nn.Sequential(linear(96, 96, nn.init.kaiming_normal_, nonlinearity="linear"), nn.SELU()) for _ in range(24)
    ]
    model = nn.Sequential(nn.Linear(24, 96), *layers, nn.Linear(96, 5)).double()
    x, y = S.vectors(seed)
    return once(model, (x.double(), y), lambda output, batch: F.cross_entropy(output, batch[-1]))


@label("healthy", family="he relu")
def he_relu(seed):
    """16 ReLU layers of width 256 with He weights and 64 rows: variance kept on average. Measured: output gradients
    0.00051 at 0 and 0.0066 at 17 (of 18), parameters' 0.32 and 6.5; loss 1.79 -> 0.00159 in 30 steps of Adam."""
    layers = [nn.Sequential(linear(256, 256, nn.init.kaiming_normal_), nn.ReLU()) for _ in range(16)]
    model = nn.Sequential(linear(24, 256, nn.init.kaiming_normal_), *layers, nn.Linear(256, 5))
    return once(model, S.vectors(seed, batch=64), S.cross_entropy)


class Highway(nn.Module):
    """A highway layer whose transform gate starts at sigmoid(-2)."""

    def __init__(self, width=48):
        super().__init__()
        self.transform, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -2.0)

    def forward(self, x):
        gate = self.gate(x).sigmoid()
        return gate * F.relu(self.transform(x)) + (1 - gate) * x


@label("healthy", family="highway")
def highway(seed):
    """12 highway layers, the carry at 0.88 (Srivastava et al. start gates at -1 to -4), after 15 steps of AdamW.
    Measured: output gradients 0.00062 at 0 and 0.012 at 13 (of 14), parameters' 0.12 and 0.24; loss 1.42 -> 0.885 in
    30 steps of Adam."""
    model = nn.Sequential(nn.Linear(24, 48), *[Highway() for _ in range(12)], nn.Linear(48, 5))
    S.settle(model, S.vectors(seed), S.cross_entropy, steps=15)
    return once(model, S.vectors(seed), S.cross_entropy)


class Scaled(nn.Module):
    """A residual branch behind a weight that starts at 1/sqrt(depth), as in Stable ResNet."""

    def __init__(self, depth, width=48):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.kaiming_normal_(self.up.weight)
        nn.init.kaiming_normal_(self.down.weight, nonlinearity="linear")
        self.weight = nn.Parameter(torch.tensor(depth**-0.5))

    def forward(self, x):
        return x + self.weight * self.down(F.relu(self.up(x)))


@label("healthy", family="scaled residual", variants=({"recompute": False}, {"recompute": True}))
def branches_scaled_by_depth(seed, recompute):
    """40 residual layers without norm at 1/sqrt(40): variance grows e-fold in all; also with recomputation.
    Measured: False: output gradients 0.0036 at blocks.0 and 0.0024 at blocks.39 (of 40), parameters' 0.14 and 0.16;
    loss 1.6 -> 7.04e-07 in 30 steps of Adam. True: output gradients 0.0036 at blocks.0 and 0.0024 at blocks.39 (of
    40), parameters' 0.14 and 0.16; loss 1.6 -> 7.04e-07 in 30 steps of Adam."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.entry, self.exit = nn.Linear(24, 48), nn.Linear(48, 5)
            self.blocks = nn.ModuleList(Scaled(40) for _ in range(40))

        def forward(self, x):
            x = self.entry(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
            return self.exit(x)

    return once(Stack(), S.vectors(seed), S.cross_entropy)


@label("healthy", family="deep supervision")
def heads_at_every_depth(seed):
    """12 Pre-LN blocks with a classifier after each third, losses averaged: early blocks get more, as wanted.
    Measured: output gradients 0.0015 at blocks.0 and 0.0006 at blocks.11 (of 12), parameters' 0.23 and 0.092; loss
    1.65 -> 0.048 in 30 steps of Adam."""

    class Exits(nn.Module):
        def __init__(self, width=48):
            super().__init__()
            self.entry = nn.Linear(24, width)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
                for _ in range(12)
            )
            self.heads = nn.ModuleList(nn.Linear(width, 5) for _ in range(4))

        def forward(self, x):
            x, said = self.entry(x), []
            for k, block in enumerate(self.blocks):
                x = x + block(x)
                if k % 3 == 2:
                    said.append(self.heads[k // 3](x))
            return torch.stack(said)

    def loss(output, batch):
        return F.cross_entropy(output.flatten(0, 1), batch[-1].repeat(4))

    return once(Exits(), S.vectors(seed), loss)


@label("healthy", family="stochastic depth")
def branches_dropped_at_random(seed):
    """16 Pre-LN blocks, each left out of a step with chance 0.2, over 6 steps of SGD with momentum. Measured: output
    gradients 0.0038 at blocks.0 and 0.0022 at blocks.15 (of 16), parameters' 0.77 and 0.35; 18 of 102 parameters get
    no gradient; loss 1.65 -> 0.924."""

    class Dropped(nn.Module):
        def __init__(self, width=48):
            super().__init__()
            self.entry, self.exit = nn.Linear(24, width), nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 5))
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width))
                for _ in range(16)
            )

        def forward(self, x):
            x = self.entry(x)
            for block in self.blocks:
                if torch.rand(()) > 0.2:
                    x = x + block(x) / 0.8
            return self.exit(x)

    model, batch = Dropped(), S.vectors(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch), steps=6, optimizer=optimizer)
