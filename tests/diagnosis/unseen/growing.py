"""Models whose gradient grows towards the input, by their construction."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit


def stack(depth, make, width=48, inputs=24, outputs=5):
    """A chain of like layers between an entry and an exit."""
    return nn.Sequential(nn.Linear(inputs, width), *[make() for _ in range(depth)], nn.Linear(width, outputs))


@label("exploding", family="loud relu")
def gain_for_he_taken_twice(seed):
    """16 ReLU layers with He's gain applied to the deviation twice: each layer doubles the mean square. Measured:
    output gradients 1.6e+02 at 0 and 0.016 at 17 (of 18), parameters' 3.4e+04 and 1.2e+05; loss 1.25e+04 -> 34.8 in
    30 steps of Adam."""

    def make():
        layer = nn.Linear(48, 48)
        nn.init.normal_(layer.weight, std=2 * (2 / 48) ** 0.5)
        return nn.Sequential(layer, nn.ReLU())

    return once(stack(16, make), S.vectors(seed), S.cross_entropy)


@label("exploding", family="randn convolutions")
def convolutions_from_randn(seed):
    """8 convolutions whose weights are torch.randn: 144 inputs a unit multiply by 8 each. Measured: output gradients
    2.5e+03 at 0 and 0.068 at 11 (of 12), parameters' 7.8e+06 and 1.2e+07; loss 2.41e+06 -> 3.5e+04 in 30 steps of
    Adam."""
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(8)]
    for conv, _ in layers:
        nn.init.normal_(conv.weight)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    return once(model, S.images(seed), S.cross_entropy)


class Doubling(nn.Module):
    """A residual branch with He weights and no norm: the sum has three times the mean square."""

    def __init__(self, width=48):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.kaiming_normal_(self.up.weight)
        nn.init.kaiming_normal_(self.down.weight)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@label("exploding", family="residual without norm")
def residual_without_norm_or_scale(seed):
    """24 residual blocks that neither norm nor scale: mean squares triple in each (Hanin and Rolnick). Measured:
    output gradients 1.7e+03 at 0 and 0.017 at 25 (of 26), parameters' 3.6e+05 and 1.3e+06; loss 2.14e+05 -> 63.8 in
    30 steps of Adam."""
    return once(stack(24, Doubling), S.vectors(seed), S.cross_entropy)


@label("exploding", family="recurrent stack")
def recurrent_layers_above_one(seed):
    """6 ReLU RNN layers over 20 steps with recurrent weights of spectral radius 2.5 and He's inputs, a loss on every
    step. Measured: output gradients 6.3e+02 at layers.0 and 0.00076 at layers.5 (of 6), parameters' 4e+05 and
    4.5e+05; loss 1.24e+05 -> 626 in 30 steps of Adam."""

    class Stack(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.entry, self.head = nn.Linear(24, width), nn.Linear(width, 5)
            self.layers = nn.ModuleList(nn.RNN(width, width, nonlinearity="relu", batch_first=True) for _ in range(6))
            for layer in self.layers:
                nn.init.orthogonal_(layer.weight_hh_l0, gain=2.5)
                nn.init.kaiming_normal_(layer.weight_ih_l0)

        def forward(self, x):
            x = self.entry(x)
            for layer in self.layers:
                x, _ = layer(x)
            return self.head(x)

    x = torch.randn(8, 20, 24, generator=S.generator_of(seed))
    return once(Stack(), (x, torch.arange(160) % 5), S.cross_entropy)


@label("exploding", family="deep batch norm")
def batch_norm_without_shortcut(seed):
    """50 layers of Linear, batch norm and ReLU without shortcut: gradients grow 1.2 times a layer (Yang et al.
    2019). Measured: output gradients 16 at 0 and 0.0032 at 51 (of 52), parameters' 6.1e+03 and 0.62; loss 1.71 ->
    1.63 in 30 steps of Adam."""
    model = stack(50, lambda: nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU()))
    return once(model, S.vectors(seed, batch=128), S.cross_entropy)


@label("exploding", family="rate too high")
def rate_a_thousand_times_too_high(seed):
    """12 He layers, 4 steps of Adam at 0.1 for 1e-4: every weight moved by 0.4, three times its scale, all one way.
    Measured: output gradients 30 at 0 and 0.018 at 13 (of 14), parameters' 6.1e+03 and 1.5e+04; loss 9.95e+03 ->
    40.5 in 30 steps of Adam."""

    def make():
        layer = nn.Linear(48, 48)
        nn.init.kaiming_normal_(layer.weight)
        return nn.Sequential(layer, nn.LeakyReLU(0.2))

    model, batch = stack(12, make), S.vectors(seed)
    S.settle(model, batch, S.cross_entropy, steps=4, rate=0.1)
    return once(model, batch, S.cross_entropy)


class LoudFlow(nn.Module):
    """Additive couplings with a fixed factor of 3 on the moved half."""

    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))

    def forward(self, x):
        kept, moved = x.chunk(2, dim=-1)
        return torch.cat([3 * moved + self.net(kept), kept], dim=-1)


@label("exploding", family="expanding flow")
def flow_that_expands(seed):
    """16 couplings that triple one half in turn, with no term for the density: 3^8 from end to end. Measured: output
    gradients 8.3e+04 at 0 and 14 at 15 (of 16), parameters' 3.4e+06 and 9.2e+06; loss 5.22e+07 -> 2.57e+07 in 30
    steps of Adam."""
    model = nn.Sequential(*[LoudFlow() for _ in range(16)])
    x, _ = S.vectors(seed, width=32)
    return once(model, (x, torch.zeros_like(x)), S.squares)


class Euler(nn.Module):
    """One step of a stiff equation that is too long for it."""

    def __init__(self, width=48):
        super().__init__()
        self.field = nn.Linear(width, width)
        nn.init.xavier_normal_(self.field.weight)

    def forward(self, x):
        return x + 1.5 * nn.functional.leaky_relu(self.field(x), 0.5)


@label("exploding", family="long euler steps")
def euler_steps_too_long(seed):
    """A neural equation in 20 steps of length 1.5 for 0.05, in float64: each multiplies by about 1.5. Measured:
    output gradients 26 at 0 and 0.018 at 21 (of 22), parameters' 6.1e+03 and 1.8e+04; loss 2.49e+03 -> 0 in 30 steps
    of Adam."""
    x, y = S.vectors(seed)
    return once(stack(20, Euler).double(), (x.double(), y), S.cross_entropy)


@label("exploding", family="summed attention")
def attention_summed_without_softmax(seed):
    """8 residual layers that sum over 32 tokens where a mean was meant, and no norm follows. Measured: output
    gradients 1.7e+07 at 0 and 0.00069 at 9 (of 10), parameters' 3.1e+09 and 1.9e+10; loss 8.49e+09 -> 2.47e+08 in 30
    steps of Adam."""

    class Sums(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.value = nn.Linear(width, width)

        def forward(self, x):
            return x + self.value(x).sum(1, keepdim=True)

    model = nn.Sequential(nn.Embedding(256, 32), *[Sums() for _ in range(8)], nn.Linear(32, 256))
    return once(model, S.text(seed, length=32), S.cross_entropy)


class Chaotic(nn.Module):
    """Post-LN where a tanh of three times its input, four times as loud as the stream, is added."""

    def __init__(self, width=48):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        nn.init.xavier_normal_(self.linear.weight)

    def forward(self, x):
        return self.norm(x + 4 * torch.tanh(3 * self.linear(x)))


@label("exploding", family="chaotic post norm")
def post_norm_in_the_chaotic_phase(seed):
    """24 Post-LN layers that a tanh with gain 3 dominates: neighbouring inputs part (Poole et al. 2016), so that
    gradients grow; the norm divides by 4 what the branch's slopes multiply by more. Measured: output gradients 17 at
    0 and 0.013 at 25 (of 26), parameters' 3.1e+03 and 1.3; loss 1.79 -> 1.45 in 30 steps of Adam."""
    return once(stack(24, Chaotic), S.vectors(seed), S.cross_entropy)
