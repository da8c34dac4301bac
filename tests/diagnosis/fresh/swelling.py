"""Models whose gradient swells towards the input, by their construction."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


def column(depth, make, width=40, inputs=24, outputs=5):
    """A chain of like layers between an entry and an exit."""
    return nn.Sequential(nn.Linear(inputs, width), *[make() for _ in range(depth)], nn.Linear(width, outputs))


class Binary(nn.Module):
    """A sign forward, its input's gradient backward, whatever the input was."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.linear.weight, gain=2.0)

    def forward(self, x):
        x = self.linear(x)
        return x + (x.sign() - x).detach()


@label("exploding", family="binary units")
def straight_through_without_its_clip(seed):
    """14 layers of signs whose gradient goes straight through weights of gain 2, and not only where the input is
    below 1: outputs stay at +-1, the gradient doubles. Measured: output gradients 39 at 0 and 0.013 at 15 (of 16),
    parameters' 7.4e+03 and 1; loss 1.69 -> 1.46 in 30 steps of Adam."""
    return once(column(14, Binary), S.vectors(seed), S.cross_entropy)


class Sine(nn.Module):
    """A sine of frequency 30 on PyTorch's weights, which are not divided by 30."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.sin(30 * self.linear(x))


@label("exploding", family="fast sines")
def sines_without_their_start(seed):
    """10 layers of SIREN with its frequency of 30 and without its start: slopes of 30 over sqrt(6), outputs below
    1. Measured: output gradients 2e+08 at 0 and 0.012 at 11 (of 12), parameters' 3.6e+10 and 0.71; loss 1.56 ->
    1.73 in 30 steps of Adam."""
    return once(column(10, Sine), S.vectors(seed), S.cross_entropy)


class Twice(nn.Module):
    """A Pre-LN unit that already holds its shortcut."""

    def __init__(self, width=40):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 80), nn.Linear(80, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@label("exploding", family="shortcut twice")
def shortcut_added_twice(seed):
    """18 Pre-LN units that add their shortcut, inside a loop that adds it again, and no norm at the end: 2^18.
    Measured: output gradients 4.8e+02 at units.0 and 0.0036 at units.17 (of 18), parameters' 7.8e+04 and 0.63; loss
    1.21e+05 -> 0 in 30 steps of Adam."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.entry, self.exit = nn.Linear(24, 40), nn.Linear(40, 5)
            self.units = nn.ModuleList(Twice() for _ in range(18))

        def forward(self, x):
            x = self.entry(x)
            for unit in self.units:
                x = x + unit(x)
            return self.exit(x)

    return once(Stack(), S.vectors(seed), S.cross_entropy)


@label("exploding", family="summed neighbours")
def neighbours_summed_and_not_averaged(seed):
    """10 rounds of a graph isomorphism network with a sum over about twelve neighbours and no norm, in float64:
    each multiplies by its graph's largest eigenvalue. Measured: output gradients 4e+07 at rounds.0 and 0.0024 at
    rounds.9 (of 10), parameters' 3e+11 and 1.4e+11; loss 8.19e+09 -> 4.94e+08 in 30 steps of Adam."""

    class Sums(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.entry, self.exit = nn.Linear(8, width), nn.Linear(width, 3)
            self.rounds = nn.ModuleList(
                nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(10)
            )
            for network in self.rounds:
                nn.init.kaiming_normal_(network[0].weight)
                nn.init.xavier_normal_(network[2].weight)

        def forward(self, x, links):
            x = self.entry(x)
            for network in self.rounds:
                x = network(x + links @ x)
            return self.exit(x)

    generator = S.generator_of(seed)
    links = (torch.rand(50, 50, generator=generator) < 0.12).double()
    links = ((links + links.mT) > 0).double()
    batch = (torch.randn(50, 8, generator=generator).double(), links, torch.arange(50) % 3)
    return once(Sums().double(), batch, lambda output, batch: F.cross_entropy(output, batch[-1]))


@label("exploding", family="steep leaky")
def leaky_slope_of_five(seed):
    """14 layers of He's weights with LeakyReLU(5), a 0.5 without its point: the negative half is multiplied by 5.
    Measured: output gradients 1.8e+07 at 0 and 0.017 at 15 (of 16), parameters' 3.4e+09 and 2.6e+10; loss 1.73e+09
    -> 0 in 30 steps of Adam."""

    def make():
        layer = nn.Linear(40, 40)
        nn.init.kaiming_normal_(layer.weight)
        return nn.Sequential(layer, nn.LeakyReLU(5.0))

    return once(column(14, make), S.vectors(seed), S.cross_entropy)


class Quantised(nn.Module):
    """Eight-bit activations with a straight-through gradient that nobody divides by 127 again."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x = 127 * F.relu(self.linear(x))
        return x + (x.round() - x).detach()


@label("exploding", family="quantised")
def integers_never_scaled_back(seed):
    """8 layers of fake quantisation that multiply by 127, round, and leave the division out. Measured: output
    gradients 1.7e+11 at 0 and 0.017 at 9 (of 10), parameters' 2.7e+13 and 6.3e+13; loss 9.06e+12 -> 0 in 30 steps
    of Adam."""
    return once(column(8, Quantised), S.vectors(seed), S.cross_entropy)


class Reinjected(nn.Module):
    """A unit without norm whose branch goes three times as far as it should."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        nn.init.kaiming_normal_(self.first.weight)
        nn.init.kaiming_normal_(self.second.weight)

    def forward(self, x):
        return x + 1.5 * self.second(F.silu(self.first(x)))


@label("exploding", family="residual convolutions")
def super_resolution_without_its_scale(seed):
    """EDSR's 16 residual units, which have no norm by design, with 1.5 on the branch where 0.1 is meant, trained
    for 2 steps of Adam at 1e-5. Measured: output gradients 39 at 0 and 0.00022 at 17 (of 18), parameters' 1.2e+05
    and 3e+05; loss 4.84e+04 -> 4.73e+04."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *[Reinjected() for _ in range(16)], nn.Conv2d(16, 3, 3, 1, 1))
    pictures, _ = S.images(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    return fit(model, lambda _: (model(pictures) - pictures).abs().mean(), steps=2, optimizer=optimizer)


class Amplified(torch.autograd.Function):
    """Nothing forward, three times the gradient backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


@label("exploding", family="gradient scale")
def gradients_multiplied_in_every_unit(seed):
    """12 sound Pre-LN units behind a function that multiplies gradients by 3, meant for the first alone. Forward,
    nothing is wrong. Measured: output gradients 2.1e+03 at 0 and 0.013 at 13 (of 14), parameters' 3.4e+05 and 1;
    loss 1.69 -> 0.00081 in 30 steps of Adam."""

    class Loud(Twice):
        def forward(self, x):
            return super().forward(Amplified.apply(x))

    return once(column(12, Loud), S.vectors(seed), S.cross_entropy)
