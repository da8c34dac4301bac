"""Models whose gradient shrinks towards the input, by their construction: backward alone, gates, norms, projections."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


def column(depth, make, width=40, inputs=24, outputs=5):
    """A chain of like layers between an entry and an exit."""
    return nn.Sequential(nn.Linear(inputs, width), *[make() for _ in range(depth)], nn.Linear(width, outputs))


@label("vanishing", family="softmax between")
def softmax_as_an_activation(seed):
    """10 layers with a softmax over 40 units for an activation: entries are near 1/40, and so is its slope. In
    float64. Measured: output gradients 6.1e-22 at 0 and 0.013 at 11 (of 12), parameters' 9.9e-20 and 0.2; loss 1.61
    -> 1.59 in 30 steps of Adam."""
    x, y = S.vectors(seed)
    model = column(10, lambda: nn.Sequential(nn.Linear(40, 40), nn.Softmax(-1))).double()
    return once(model, (x.double(), y), lambda output, batch: F.cross_entropy(output, batch[-1]))


@label("vanishing", family="weight norm")
def weight_norm_with_short_rows(seed):
    """14 layers under weight norm whose lengths were started at 0.3: 0.3 for each row and half by ReLU. Measured:
    output gradients 7.7e-13 at 0 and 0.012 at 15 (of 16), parameters' 1.3e-10 and 0.22; loss 1.61 -> 1.55 in 30
    steps of Adam."""

    def make():
        layer = weight_norm(nn.Linear(40, 40))
        nn.init.constant_(layer.parametrizations.weight.original0, 0.3)
        return nn.Sequential(layer, nn.ReLU())

    return once(column(14, make), S.vectors(seed), S.cross_entropy)


@label("vanishing", family="spectral norm")
def spectral_norm_in_every_layer(seed):
    """20 layers under spectral norm with leaky ReLU: the largest singular value is 1, the typical one half of it.
    Measured: output gradients 4.8e-12 at 0 and 0.013 at 21 (of 22), parameters' 8.4e-10 and 0.22; loss 1.62 -> 1.53
    in 30 steps of Adam."""
    model = column(20, lambda: nn.Sequential(spectral_norm(nn.Linear(40, 40)), nn.LeakyReLU(0.1)))
    return once(model, S.vectors(seed), S.cross_entropy)


class Projected(nn.Module):
    """A residual unit whose shortcut is a convolution too, and no norm brings its size back."""

    def __init__(self, width=16):
        super().__init__()
        self.way = nn.Conv2d(width, width, 1)
        self.branch = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 1))
        nn.init.normal_(self.branch[2].weight, std=0.01)

    def forward(self, x):
        return F.relu(self.way(x) + self.branch(x))


@label("vanishing", family="projected shortcuts")
def shortcuts_that_are_convolutions(seed):
    """16 residual units with a 1x1 convolution as PyTorch starts it on every shortcut, where the width never
    changes and none is needed: each keeps a sixth of the mean square. Measured: output gradients 8.7e-11 at 0 and
    0.05 at 19 (of 20), parameters' 1.9e-07 and 0.34; loss 2.34 -> 2.1 in 30 steps of Adam."""
    units = [Projected() for _ in range(16)]
    model = nn.Sequential(nn.Conv2d(3, 16, 1), *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return once(model, S.images(seed), S.cross_entropy)


class Damped(nn.Module):
    """A sound Pre-LN unit whose gradient is multiplied by a hook that its author left in."""

    def __init__(self, width=40):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 80), nn.Linear(80, width)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.4 * gradient)
        return x


@label("vanishing", family="gradient hook")
def hooks_that_damp_the_gradient(seed):
    """12 sound Pre-LN units; a hook on each one's output multiplies the gradient by 0.4. Forward, nothing is wrong.
    Measured: output gradients 6.6e-08 at 0 and 0.013 at 13 (of 14), parameters' 1.1e-05 and 1; loss 1.69 ->
    0.000905 in 30 steps of Adam."""
    return once(column(12, Damped), S.vectors(seed), S.cross_entropy)


@label("vanishing", family="slow gru")
def update_gates_that_keep_the_past(seed):
    """8 GRU layers whose update gates start at sigmoid(5), as for long memories, over 6 steps from a state of 0: a
    layer lets under a hundredth of its input through a step. Measured: output gradients 3.5e-18 at layers.0 and
    0.0019 at layers.7 (of 8), parameters' 6.1e-18 and 0.001; loss 1.61 -> 1.61 in 30 steps of Adam."""

    class Slow(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.entry, self.exit = nn.Linear(24, width), nn.Linear(width, 5)
            self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(8))
            for layer in self.layers:
                nn.init.constant_(layer.bias_ih_l0[width : 2 * width], 5.0)

        def forward(self, x):
            x = self.entry(x)
            for layer in self.layers:
                x, _ = layer(x)
            return self.exit(x)

    x = torch.randn(8, 6, 24, generator=S.generator_of(seed))
    return once(Slow(), (x, torch.arange(48) % 5), S.cross_entropy)


class Asks(nn.Module):
    """A Post-LN decoder layer that asks a memory much louder than its stream."""

    def __init__(self, width=40):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(width, 4, batch_first=True), nn.LayerNorm(width)

    def forward(self, x, memory):
        return self.norm(x + self.attention(x, memory, memory, need_weights=False)[0])


@label("vanishing", family="loud memory")
def memory_that_drowns_the_decoder(seed):
    """14 Post-LN layers that attend to a memory which no norm tamed, about ten times their stream and nearly the
    same at all its positions: sums are the memory's, the norm leaves a tenth of the shortcut. Measured: output
    gradients 5e-12 at layers.0 and 0.0018 at layers.13 (of 14), parameters' 2.3e-09 and 0.83; loss 1.76 -> 1.56 in
    30 steps of Adam."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.entry, self.exit = nn.Linear(24, 40), nn.Linear(40, 5)
            self.layers = nn.ModuleList(Asks() for _ in range(14))

        def forward(self, x, memory):
            x = self.entry(x)
            for layer in self.layers:
                x = layer(x, memory)
            return self.exit(x)

    generator = S.generator_of(seed)
    x, memory = torch.randn(8, 6, 24, generator=generator), 12 * torch.randn(8, 1, 40, generator=generator)
    memory = memory + 0.1 * torch.randn(8, 10, 40, generator=generator)
    return once(Decoder(), (x, memory, torch.arange(48) % 5), S.cross_entropy)


class Mixes(nn.Module):
    """A linear layer and a Fourier transform over 16 positions that is divided by 16 and not by 4."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.orthogonal_(self.linear.weight, gain=2**0.5)

    def forward(self, x):
        return torch.fft.fft(F.relu(self.linear(x)), dim=1, norm="forward").real


@label("vanishing", family="fourier scale")
def fourier_transforms_divided_by_their_length(seed):
    """10 layers that mix 16 positions by norm="forward": the real part keeps a thirty-second of the mean square,
    and nothing brings it back. Measured: output gradients 7.7e-10 at 0 and 0.0042 at 11 (of 12), parameters'
    2.5e-07 and 0.043; loss 1.61 -> 1.61 in 30 steps of Adam."""
    x = torch.randn(6, 16, 24, generator=S.generator_of(seed))
    return once(column(10, Mixes), (x, torch.arange(96) % 5), S.cross_entropy)


class Capsules(nn.Module):
    """Ten capsules of four numbers, squashed: a short vector gets the square of its length."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        parts = self.linear(x).unflatten(-1, (10, 4))
        square = parts.square().sum(-1, keepdim=True)
        return (parts * square / (1 + square) / (square + 1e-9).sqrt()).flatten(-2)


@label("vanishing", family="capsules")
def capsules_squashed_in_every_layer(seed):
    """9 layers of capsules without routing: lengths fall below 1, where squashing squares them. Measured: output
    gradients 5.8e-11 at 0 and 0.013 at 10 (of 11), parameters' 1.1e-08 and 0.23; loss 1.64 -> 1.61 in 30 steps of
    Adam."""
    return once(column(9, Capsules), S.vectors(seed), S.cross_entropy)


class Excited(nn.Module):
    """A convolution with He's weights, then squeeze and excitation by a sigmoid near one half."""

    def __init__(self, width=16):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.down, self.up = nn.Linear(width, width // 4), nn.Linear(width // 4, width)
        nn.init.kaiming_normal_(self.conv.weight)

    def forward(self, x):
        x = F.relu(self.conv(x))
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))[..., None, None]


@label("vanishing", family="excitation")
def excitations_that_halve(seed):
    """18 convolutions in a row whose channels are weighted by a sigmoid that starts near one half, without norm or
    shortcut: 2^-18. After 2 steps of SGD. Measured: output gradients 4.2e-10 at 0 and 0.05 at 21 (of 22),
    parameters' 1.9e-07 and 0.26; loss 2.3 -> 2.29."""
    units = [Excited() for _ in range(18)]
    model = nn.Sequential(nn.Conv2d(3, 16, 1), *units, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    batch, optimizer = S.images(seed), torch.optim.SGD(model.parameters(), lr=0.01)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch), steps=2, optimizer=optimizer)


class Averaged(nn.Module):
    """A unit whose sum is a weighted mean, most of it a branch that starts small."""

    def __init__(self, width=40):
        super().__init__()
        self.mix = nn.Parameter(torch.tensor(-1.0))
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=0.01)

    def forward(self, x):
        keep = self.mix.sigmoid()
        return keep * x + (1 - keep) * self.linear(self.norm(x))


@label("vanishing", family="running mean")
def exponential_mean_over_depth(seed):
    """16 units that keep sigmoid(-1) = 0.27 of their stream and give 0.73 to a branch of weights of 0.01, by a
    learned number that had the wrong sign. Measured: output gradients 6e-07 at 0 and 0.013 at 17 (of 18),
    parameters' 0.0001 and 0.23; loss 1.62 -> 1.27 in 30 steps of Adam."""
    return once(column(16, Averaged), S.vectors(seed), S.cross_entropy)
