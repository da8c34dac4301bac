"""Sound models of rare kinds: fixed points, generated weights, spikes, splines, equations, latents, columns."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit


class Columns(nn.Module):
    """FT-Transformer: a token for each column, a class token, Pre-LN layers of torch."""

    def __init__(self, width=32):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(24, width) * 0.2), nn.Parameter(torch.randn(24, width) * 0.2)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.2)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 5))

    def forward(self, x):
        x = x[..., None] * self.scale + self.shift
        return self.head(self.encoder(torch.cat([self.first.expand(len(x), -1, -1), x], dim=1))[:, 0])


@label("healthy", family="table")
def transformer_on_columns(seed):
    """A table of 24 columns through four Pre-LN layers with dropout, parameters in bfloat16. Measured: output
    gradients 0.00057 at encoder.layers.0 and 0.00034 at encoder.layers.3 (of 4), parameters' 0.62 and 0.32; loss
    1.62 -> 0.973 in 30 steps of Adam."""
    x, y = S.vectors(seed)
    return once(Columns().bfloat16(), (x.bfloat16(), y), S.cross_entropy)


class Equilibrium(nn.Module):
    """Layers that each repeat one contraction to its fixed point, with the last step alone in the gradient."""

    def __init__(self, width=32, layers=4):
        super().__init__()
        self.entry, self.exit = nn.Linear(24, width), nn.Linear(width, 5)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        for layer in self.own:
            layer.weight.data.mul_(0.5)

    def forward(self, x):
        x = self.entry(x)
        for own, norm in zip(self.own, self.norms, strict=True):
            z = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(15):
                    z = torch.tanh(own(z) + x)
            x = norm(x + torch.tanh(own(z) + x))
        return self.exit(x)


@label("healthy", family="equilibrium")
def equilibrium_with_one_step_gradient(seed):
    """A deep equilibrium model with the one-step gradient: 15 iterations without a graph are meant. Measured: output
    gradients 0.0026 at own.0 and 0.00099 at own.3 (of 4), parameters' 0.27 and 0.14; loss 1.55 -> 0.682 in 30 steps
    of Adam."""
    return once(Equilibrium(), S.vectors(seed), S.cross_entropy)


class Generated(nn.Module):
    """A hypernetwork: for each of six residual layers it makes a weight of rank 4 from a learned code."""

    def __init__(self, width=24):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(6, 8))
        self.maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2 * 4 * width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        for code, norm in zip(self.codes, self.norms, strict=True):
            down, up = self.maker(code).view(2, 4, -1)
            x = x + F.gelu(norm(x) @ down.mT) @ up
        return self.head(x)


@label("healthy", family="hypernetwork")
def generated_weights(seed):
    """Weights of residual layers made by another network, which is called six times a step. Measured: output
    gradients 0.0039 at norms.0 and 0.0035 at norms.5 (of 6), parameters' 0.29 and 0.31; loss 2.79 -> 0.949 in 30
    steps of Adam."""
    return once(Generated(), S.vectors(seed), S.cross_entropy)


class Spike(torch.autograd.Function):
    """A step forward, a fast sigmoid's slope backward."""

    @staticmethod
    def forward(ctx, potential):
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (potential,) = ctx.saved_tensors
        return gradient / (1 + 2 * potential.abs()).square()


class Spiking(nn.Module):
    """Four layers of leaky neurons over 12 ticks, read out by the mean of the last potential."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, width) for a in (24, width, width, width))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=2 / layer.in_features**0.5)
        self.read = nn.Linear(width, 5)

    def forward(self, x):
        potential, total = [0.0] * 4, 0
        for _ in range(12):
            z = x
            for k, layer in enumerate(self.layers):
                potential[k] = 0.8 * potential[k] + layer(z)
                z = Spike.apply(potential[k] - 1)
                potential[k] = potential[k] * (1 - z.detach())
            total = total + self.read(z)
        return total / 12


@label("healthy", family="spiking")
def spikes_with_a_surrogate(seed):
    """A spiking network with a surrogate slope, so that steps pass a gradient. Measured: output gradients 7.8e-05 at
    layers.0 and 9.5e-05 at layers.3 (of 4), parameters' 0.095 and 0.097; loss 1.62 -> 1.27 in 30 steps of Adam."""
    return once(Spiking(), S.vectors(seed), S.cross_entropy)


class Splines(nn.Module):
    """A layer of a Kolmogorov-Arnold network: radial bumps on every edge beside a SiLU."""

    def __init__(self, a, b, bumps=6):
        super().__init__()
        self.norm, self.plain = nn.LayerNorm(a), nn.Linear(a, b)
        self.centres = torch.linspace(-2, 2, bumps)
        self.weight = nn.Parameter(torch.randn(b, a * bumps) * 0.5 / (a * bumps) ** 0.5)

    def forward(self, x):
        x = self.norm(x)
        bumps = (-((x[..., None] - self.centres) / 0.8).square()).exp().flatten(-2)
        return self.plain(F.silu(x)) + F.linear(bumps, self.weight)


@label("healthy", family="kan")
def kolmogorov_arnold(seed):
    """Five layers of FastKAN with norms between. Measured: output gradients 0.0051 at 0 and 0.013 at 4 (of 5),
    parameters' 1.1 and 1.4; loss 1.66 -> 0.147 in 30 steps of Adam."""
    widths = (24, 32, 32, 32, 32, 5)
    model = nn.Sequential(*[Splines(a, b) for a, b in itertools.pairwise(widths)])
    return once(model, S.vectors(seed), S.cross_entropy)


class Latents(nn.Module):
    """Perceiver: 8 latents read a long input once, then attend to each other in Pre-LN layers."""

    def __init__(self, width=32, depth=6):
        super().__init__()
        self.latents, self.entry = nn.Parameter(torch.randn(8, width) * 0.5), nn.Linear(24, width)
        self.read = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.heads = nn.ModuleDict({"kind": nn.Linear(width, 5), "size": nn.Linear(width, 1)})

    def forward(self, x):
        seen, z = self.norms[0](self.entry(x)), self.latents.expand(len(x), -1, -1)
        z = z + self.read(self.norms[1](z), seen, seen, need_weights=False)[0]
        for layer in self.layers:
            z = layer(z)
        return {name: head(z.mean(1)) for name, head in self.heads.items()}


@label("healthy", family="perceiver")
def latents_with_two_tasks(seed):
    """A Perceiver over 60 rows with a head for classes and one for a number, losses weighted 1 and 0.5. Measured:
    output gradients 0.005 at layers.0 and 0.0018 at layers.5 (of 6), parameters' 3.2 and 2.2; loss 2.04 -> 0.0176 in
    30 steps of Adam."""
    x = torch.randn(8, 60, 24, generator=S.generator_of(seed))

    def loss(output, batch):
        return F.cross_entropy(output["kind"], batch[-1]) + 0.5 * F.mse_loss(output["size"][:, 0], x.std((1, 2)))

    return once(Latents(), (x, torch.arange(8) % 5), loss)


class Flowing(nn.Module):
    """A neural equation: fourth-order steps of 0.1 through its own field in each of eight spans."""

    def __init__(self, width=32):
        super().__init__()
        self.entry, self.exit = nn.Linear(24, width), nn.Linear(width, 5)
        self.fields = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8))

    def forward(self, x):
        x = self.entry(x)
        for field in self.fields:
            a = field(x)
            b = field(x + 0.05 * a)
            c = field(x + 0.05 * b)
            x = x + (a + 2 * b + 2 * c + field(x + 0.1 * c)) * 0.1 / 6
        return self.exit(x)


@label("healthy", family="neural equation")
def equation_in_short_steps(seed):
    """Eight Runge-Kutta steps of 0.1, each of which calls its field four times: near the identity. Measured: output
    gradients 4.7e-05 at fields.0 and 4.7e-05 at fields.7 (of 8), parameters' 0.031 and 0.031; loss 1.57 -> 1.05 in
    30 steps of Adam."""
    return once(Flowing(), S.vectors(seed), S.cross_entropy)
