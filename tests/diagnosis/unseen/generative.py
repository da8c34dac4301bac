"""Sound models that generate or fit fields: variational, adversarial, flows, diffusion, coordinates, codebooks."""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import keelscope as ks

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit


def chain(*widths, act=nn.ReLU, last=None):
    """Linear layers with He weights and an activation between them."""
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
        nn.init.kaiming_normal_(layers[-2].weight)
    return nn.Sequential(*layers[:-1], *([last] if last else []))


def cloud(seed, count=256):
    """Points on two noisy half circles."""
    generator = S.generator_of(seed)
    angle = math.pi * torch.rand(count, generator=generator)
    upper = torch.arange(count) % 2 == 0
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x, y], 1) + 0.05 * torch.randn(count, 2, generator=generator)


class Variational(nn.Module):
    """A VAE of two chains, with the reparametrised sample between them."""

    def __init__(self, width=64, hidden=4):
        super().__init__()
        self.encoder, self.decoder = (
            chain(256, width, width, width, 2 * hidden),
            chain(hidden, width, width, width, 256),
        )

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        sample = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1).mean()
        return F.mse_loss(self.decoder(sample), x, reduction="sum") / len(x) + divergence


@label("healthy", family="vae")
def variational_autoencoder(seed):
    """Four layers each way over grey pictures, loss ELBO, after 20 steps of AdamW. Measured: output gradients 0.19
    at encoder.0 and 0.7 at encoder.6 (of 7), parameters' 75 and 67; loss 122 -> 90.9 in 30 steps of Adam."""
    pictures, _ = S.images(seed, batch=32)
    model, batch = Variational(), (pictures.mean(1).flatten(1), None)
    S.settle(model, batch, S.output_loss, steps=20)
    return once(model, batch, S.output_loss)


class Adversaries(nn.Module):
    """A generator and a critic."""

    def __init__(self):
        super().__init__()
        self.generator = chain(8, 64, 64, 64, 2)
        self.critic = chain(2, 64, 64, 64, 1, act=lambda: nn.LeakyReLU(0.2))


@label("healthy", family="gan")
def adversaries_in_turn(seed):
    """A non-saturating GAN on two half circles: three rounds, the critic on detached samples, then the generator.
    Measured: output gradients 0.00021 at generator.0 and 0.0013 at generator.6 (of 7), parameters' 0.21 and 1.8;
    loss 0.473 -> 0.567."""
    model, real = Adversaries(), cloud(seed)
    first = torch.optim.Adam(model.critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(model.generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    with ks.watch(model, optimizer=[first, second], probes=S.PROBES) as session:
        for _ in range(3):
            false = model.generator(torch.randn(256, 8))
            judged = F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(false.detach())).mean()
            first.zero_grad()
            judged.backward()
            first.step()
            fooled = F.softplus(-model.critic(false)).mean()
            second.zero_grad()
            fooled.backward()
            session.log(loss=fooled)
            second.step()
    return session.run


@label("healthy", family="autoencoder")
def convolutional_autoencoder(seed):
    """Four strided convolutions down, four transposed up, batch norm and leaky ReLU, mean square. Measured: output
    gradients 0.00011 at 0 and 8.9e-05 at 7 (of 8), parameters' 0.22 and 0.47; loss 1.2 -> 0.343 in 30 steps of Adam.
    """
    widths, layers = (3, 16, 32, 48, 64), []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.1))]
    for a, b in zip(widths[:0:-1], widths[-2:0:-1], strict=False):
        layers += [nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.1))]
    pictures, _ = S.images(seed, size=32, batch=8)
    return once(nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1)), (pictures, pictures), S.squares)


class Coupling(nn.Module):
    """An affine coupling of RealNVP with a bounded log scale; the halves swap."""

    def __init__(self, width=32):
        super().__init__()
        self.net = chain(1, width, width, 2, act=nn.SiLU)
        self.net[-1].weight.data.mul_(0.1)

    def forward(self, x, density):
        kept, moved = x.chunk(2, dim=-1)
        scale, shift = self.net(kept).chunk(2, dim=-1)
        scale = scale.tanh()
        return torch.cat([moved * scale.exp() + shift, kept], dim=-1), density + scale.sum(-1)


class Flow(nn.Module):
    """Ten couplings towards a standard normal distribution."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(Coupling() for _ in range(10))

    def forward(self, x):
        density = torch.zeros(len(x), dtype=x.dtype)
        for step in self.steps:
            x, density = step(x, density)
        return (0.5 * x.square().sum(-1) + math.log(2 * math.pi) - density).mean()


@label("healthy", family="flow")
def normalising_flow(seed):
    """RealNVP in float64, negative log likelihood of two half circles, after 20 steps of AdamW. Measured: output
    gradients 0.012 at steps.0 and 0.004 at steps.9 (of 10), parameters' 0.97 and 0.5; loss 1.59 -> 1.12 in 30 steps
    of Adam."""
    model, batch = Flow().double(), (cloud(seed).double(), None)
    S.settle(model, batch, S.output_loss, steps=20)
    return once(model, batch, S.output_loss)


class TimedBlock(nn.Module):
    """A residual block of a diffusion network, told the time, its last convolution at 0.1 of its scale."""

    def __init__(self, a, b, time):
        super().__init__()
        self.before, self.after = nn.GroupNorm(4, a), nn.GroupNorm(4, b)
        self.first, self.second = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.time = nn.Linear(time, b)
        self.shortcut = nn.Conv2d(a, b, 1) if a != b else nn.Identity()
        self.second.weight.data.mul_(0.1)

    def forward(self, x, time):
        y = self.first(F.silu(self.before(x))) + self.time(time)[..., None, None]
        return self.shortcut(x) + self.second(F.silu(self.after(y)))


class Denoiser(nn.Module):
    """A U-Net that predicts noise, told the time by sines."""

    def __init__(self, width=16):
        super().__init__()
        self.tell = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.entry, self.exit = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(TimedBlock(a, b, 32) for a, b in ((16, 16), (16, 32), (32, 48)))
        self.middle = TimedBlock(48, 48, 32)
        self.up = nn.ModuleList(TimedBlock(a, b, 32) for a, b in ((96, 32), (64, 16), (32, 16)))

    def forward(self, x, time):
        angles = time[:, None] * 10 ** torch.linspace(0, 2, 8)
        told = self.tell(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, kept = self.entry(x), []
        for k, block in enumerate(self.down):
            x = block(F.avg_pool2d(x, 2) if k else x, told)
            kept.append(x)
        x = self.middle(x, told)
        for k, block in enumerate(self.up):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0) if k else x, kept.pop()], dim=1), told)
        return self.exit(x)


@label("healthy", family="diffusion")
def denoising_unet(seed):
    """Noise predicted at random times with an exponential average beside it, 3 steps of AdamW, clipping at 1.
    Measured: output gradients 4.6e-05 at tell.0 and 0.00014 at tell.2 (of 3), parameters' 0.0036 and 0.0067; loss
    1.03 -> 0.941."""
    model, (pictures, _) = Denoiser(), S.images(seed, batch=8)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))

    def loss_of(_):
        average.update_parameters(model)
        noise, time = torch.randn_like(pictures), torch.rand(8)
        level = (math.pi / 2 * time)[:, None, None, None]
        return F.mse_loss(model(level.cos() * pictures + level.sin() * noise, time), noise)

    return fit(model, loss_of, steps=3, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), clip=1.0)


class Field(nn.Module):
    """NeRF's network: eight layers over Fourier features, which enter again at the fifth."""

    def __init__(self, width=64):
        super().__init__()
        inputs = 2 * 12
        self.layers = nn.ModuleList(nn.Linear(inputs if k == 0 else width + inputs * (k == 4), width) for k in range(8))
        for layer in self.layers:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        self.colour = nn.Linear(width, 3)

    def forward(self, places):
        angles = (places[..., None] * 2.0 ** torch.arange(6)).flatten(-2)
        known = torch.cat([angles.sin(), angles.cos()], dim=-1)
        x = known
        for k, layer in enumerate(self.layers):
            x = F.relu(layer(torch.cat([x, known], dim=-1) if k == 4 else x))
        return self.colour(x).sigmoid()


class Sine(nn.Module):
    """A layer of SIREN, with its initialisation."""

    def __init__(self, a, b, *, first=False, rate=30.0):
        super().__init__()
        self.linear, self.rate = nn.Linear(a, b), rate
        bound = 1 / a if first else (6 / a) ** 0.5 / rate
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return (self.rate * self.linear(x)).sin()


def picture(seed):
    """Places in the unit square and the colours there."""
    pictures, _ = S.images(seed, size=32, batch=1)
    grid = torch.linspace(-1, 1, 32)
    return torch.cartesian_prod(grid, grid), pictures[0].flatten(1).mT.sigmoid()


@label("healthy", family="field {kind}", variants=({"kind": "nerf"}, {"kind": "siren"}))
def coordinate_network(seed, kind):
    """A picture as a function of its place: ReLU with He weights over Fourier features, or SIREN as published.
    Measured: nerf: output gradients 2.3e-06 at layers.0 and 3.1e-06 at layers.7 (of 8), parameters' 0.0049 and
    0.049; loss 0.0506 -> 0.0111 in 30 steps of Adam. siren: output gradients 6.4e-05 at 0 and 0.00044 at 6 (of 7),
    parameters' 1.1 and 3.3; loss 0.448 -> 0.0056 in 30 steps of Adam."""
    model = Field() if kind == "nerf" else nn.Sequential(
        Sine(2, 64, first=True), *[Sine(64, 64) for _ in range(5)], nn.Linear(64, 3)
    )  # fmt: skip
    return once(model, picture(seed), S.squares)


class Codebook(nn.Module):
    """VQ-VAE: the nearest of 16 codes, the gradient straight through, losses of both sides."""

    def __init__(self, width=48):
        super().__init__()
        self.encoder, self.decoder = chain(256, width, width, width, 8), chain(8, width, width, width, 256)
        self.codes = nn.Parameter(torch.randn(16, 8) * 0.3)

    def forward(self, x):
        z = self.encoder(x)
        code = self.codes[torch.cdist(z.detach(), self.codes.detach()).argmin(-1)]
        sides = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return F.mse_loss(self.decoder(z + (code - z).detach()), x) + sides


@label("healthy", family="vq-vae")
def codebook_with_straight_through(seed):
    """Quantised codes with the straight-through estimator, which hands the decoder's gradient to the encoder.
    Measured: output gradients 0.001 at encoder.0 and 0.0032 at encoder.6 (of 7), parameters' 0.43 and 0.52; loss
    0.788 -> 0.433 in 30 steps of Adam."""
    pictures, _ = S.images(seed, batch=32)
    return once(Codebook(), (pictures.mean(1).flatten(1), None), S.output_loss)
