"""Models whose gradient fades towards the input, by their construction."""

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
ACTS = {"sigmoid": nn.Sigmoid, "softsign": nn.Softsign, "gelu": nn.GELU}


def stack(depth, make, width=48, inputs=24, outputs=5):
    """A chain of like layers between an entry and an exit."""
    return nn.Sequential(nn.Linear(inputs, width), *[make() for _ in range(depth)], nn.Linear(width, outputs))


@label("vanishing", family="plain {act}", variants=tuple({"act": name} for name in ACTS))
def plain_chain_as_pytorch_starts_it(seed, act):
    """24 plain layers with PyTorch's own uniform weights, gain 1/sqrt(3), under a slope below 1: no shortcut, no
    norm. Measured: sigmoid: output gradients 8.7e-24 at 0 and 0.012 at 25 (of 26), parameters' 1.5e-21 and 0.58;
    loss 1.58 -> 1.52 in 30 steps of Adam. softsign: output gradients 1.3e-10 at 0 and 0.012 at 25 (of 26),
    parameters' 2.2e-08 and 0.17; loss 1.57 -> 1.52 in 30 steps of Adam. gelu: output gradients 3e-16 at 0 and 0.012
    at 25 (of 26), parameters' 6e-14 and 0.17; loss 1.58 -> 1.52 in 30 steps of Adam."""
    return once(stack(24, lambda: nn.Sequential(nn.Linear(48, 48), ACTS[act]())), S.vectors(seed), S.cross_entropy)


@label("vanishing", family="small tanh")
def weights_of_two_hundredths(seed):
    """16 tanh layers of width 64 with normal weights of 0.02, as copied from transformers, where Glorot's are 0.125.
    Measured: output gradients 3.4e-16 at 0 and 0.012 at 17 (of 18), parameters' 7.6e-14 and 0.2; loss 1.59 -> 1.52
    in 30 steps of Adam."""

    def make():
        layer = nn.Linear(64, 64)
        nn.init.normal_(layer.weight, std=0.02)
        return nn.Sequential(layer, nn.Tanh())

    return once(stack(16, make, width=64), S.vectors(seed), S.cross_entropy)


@label("vanishing", family="plain convolutions")
def convolutions_without_norm(seed):
    """30 convolutions with ReLU as PyTorch starts them: each keeps a sixth of the mean square, no shortcut.
    Measured: output gradients 2.2e-17 at 0 and 0.05 at 33 (of 34), parameters' 2e-14 and 0.28; loss 2.35 -> 2.1 in
    30 steps of Adam."""
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(30)]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    return once(model, S.images(seed), S.cross_entropy)


class Faded(nn.Module):
    """A residual block without norm whose stream is multiplied on its way out."""

    def __init__(self, factor, width=48):
        super().__init__()
        self.factor = factor
        self.branch = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return self.factor * (x + 0.1 * self.branch(x))


@label("vanishing", family="multiplied stream")
def stream_multiplied_in_every_block(seed):
    """20 residual blocks that halve their stream, as a wrong 1/2 for a sum of two; branches are too small to help.
    Measured: output gradients 2.1e-09 at 0 and 0.012 at 21 (of 22), parameters' 3.8e-07 and 0.19; loss 1.6 -> 1.57
    in 30 steps of Adam."""
    return once(stack(20, lambda: Faded(0.5)), S.vectors(seed), S.cross_entropy)


@label("vanishing", family="dropout scale")
def dropout_without_its_scale(seed):
    """16 SELU layers with a hand-written dropout of one half that does not divide by the chance to stay. Measured:
    output gradients 1e-08 at 0 and 0.013 at 17 (of 18), parameters' 1.8e-06 and 0.22; loss 1.63 -> 1.6 in 30 steps
    of Adam."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(48, 48)
            nn.init.kaiming_normal_(self.linear.weight, nonlinearity="linear")

        def forward(self, x):
            x = F.selu(self.linear(x))
            return 0.5 * x * (torch.rand_like(x) < 0.5)

    return once(stack(16, Dropped), S.vectors(seed), S.cross_entropy)


class Drowned(nn.Module):
    """Post-LN with a branch whose bias is four times as loud as its stream."""

    def __init__(self, width=48):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.normal_(self.linear.bias, std=4.0)

    def forward(self, x):
        return self.norm(x + self.linear(x))


@label("vanishing", family="post norm")
def branches_that_drown_a_post_norm(seed):
    """12 Post-LN layers whose branch is four times as loud as the stream and hardly depends on it: the norm leaves
    1/sqrt(17) of the shortcut a layer. Measured: output gradients 1.3e-10 at 0 and 0.013 at 13 (of 14), parameters'
    2.5e-08 and 2.7; loss 2 -> 1.53 in 30 steps of Adam."""
    return once(stack(12, Drowned), S.vectors(seed), S.cross_entropy)


@label("vanishing", family="recurrent stack")
def recurrent_layers_with_small_weights(seed):
    """8 tanh RNN layers over 12 steps with normal weights of 0.05 instead of 1/sqrt(32): each layer keeps a third.
    Measured: output gradients 3.9e-07 at layers.0 and 0.0021 at layers.7 (of 8), parameters' 0.0001 and 0.22; loss
    5.55 -> 4.16 in 30 steps of Adam."""

    class Stack(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
            self.layers = nn.ModuleList(nn.RNN(width, width, batch_first=True) for _ in range(8))
            for parameter in self.layers.parameters():
                nn.init.normal_(parameter, std=0.05)

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x, _ = layer(x)
            return self.head(x)

    return once(Stack(), S.text(seed, length=12), S.cross_entropy)


@label("vanishing", family="deep graph")
def graph_that_over_smooths(seed):
    """24 graph convolutions without shortcut: means over ten neighbours leave the differences a third each time.
    Measured: output gradients 3.2e-11 at rounds.0 and 0.0014 at rounds.23 (of 24), parameters' 1.8e-08 and 0.026;
    loss 1.1 -> 1.1 in 30 steps of Adam."""

    class Deep(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.entry, self.exit = nn.Linear(8, width), nn.Linear(width, 3)
            self.rounds = nn.ModuleList(nn.Linear(width, width) for _ in range(24))

        def forward(self, x, neighbours):
            x = self.entry(x)
            for linear in self.rounds:
                x = torch.tanh(linear(neighbours @ x))
            return self.exit(x)

    generator = S.generator_of(seed)
    links = (torch.rand(60, 60, generator=generator) < 0.08).float()
    links = ((links + links.mT + torch.eye(60)) > 0).float()
    batch = (torch.randn(60, 8, generator=generator), links / links.sum(1, keepdim=True), torch.arange(60) % 3)
    return once(Deep(), batch, S.cross_entropy)


class GatedOnly(nn.Module):
    """WaveNet's gated convolution without its residual: tanh times sigmoid, both below 1."""

    def __init__(self, width=24):
        super().__init__()
        self.conv = nn.Conv1d(width, 2 * width, 3, padding=1)

    def forward(self, x):
        value, gate = self.conv(x).chunk(2, dim=1)
        return value.tanh() * gate.sigmoid()


@label("vanishing", family="gated convolutions")
def gated_convolutions_without_residual(seed):
    """15 gated convolutions in a row, the residual forgotten: half a gate and a small weight each. Measured: output
    gradients 4.4e-12 at 0 and 0.0065 at 16 (of 17), parameters' 1.6e-09 and 0.11; loss 1.08 -> 1.08 in 30 steps of
    Adam."""
    model = nn.Sequential(nn.Conv1d(1, 24, 1), *[GatedOnly() for _ in range(15)], nn.Conv1d(24, 1, 1))
    x = torch.randn(8, 1, 40, generator=S.generator_of(seed))
    return once(model, (x, x.roll(1, -1)), S.squares)


@label("vanishing", family="decayed")
def decay_that_eats_the_weights(seed):
    """12 He layers after 25 steps of SGD with rate 0.1 and a weight decay of 1, taken for 1e-4: weights keep 0.9^25
    = 0.07. Measured: output gradients 1.9e-18 at 0 and 0.012 at 13 (of 14), parameters' 1.6e-15 and 0.33; loss 1.58
    -> 1.56 in 30 steps of Adam."""

    def make():
        layer = nn.Linear(48, 48)
        nn.init.kaiming_normal_(layer.weight)
        return nn.Sequential(layer, nn.LeakyReLU(0.1))

    model, batch = stack(12, make), S.vectors(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)
    for _ in range(25):
        optimizer.zero_grad()
        S.cross_entropy(model(batch[0]), batch).backward()
        optimizer.step()
    return once(model, batch, S.cross_entropy)


class NoShortcut(nn.Module):
    """A transformer block of GPT-2's weights that forgot both additions, and its norms."""

    def __init__(self, width=48):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        return self.ffn(self.attention(x, x, x, need_weights=False)[0])


@label("vanishing", family="transformer without shortcut")
def transformer_without_additions(seed):
    """6 transformer blocks with weights of 0.02 and neither shortcut nor norm, in float64. Measured: output
    gradients 1e-24 at 0 and 0.0013 at 7 (of 8), parameters' 7.7e-23 and 0.28; loss 5.54 -> 3.2 in 30 steps of Adam.
    """
    model = nn.Sequential(nn.Embedding(256, 48), *[NoShortcut() for _ in range(6)], nn.Linear(48, 256)).double()
    return once(model, S.text(seed, length=12), lambda output, batch: F.cross_entropy(output.mT, batch[-1]))


@label("vanishing", family="deep autoencoder")
def autoencoder_of_sigmoids(seed):
    """Hinton's autoencoder without pretraining: eight sigmoid layers down to 8 and eight up, Glorot weights.
    Measured: output gradients 4.3e-14 at 0 and 0.00023 at 15 (of 16), parameters' 3.6e-12 and 0.025; loss 0.0555 ->
    0.0422 in 30 steps of Adam."""
    widths = [64, 56, 48, 40, 32, 28, 24, 16, 8, 16, 24, 28, 32, 40, 48, 56, 64]
    layers = []
    for a, b in itertools.pairwise(widths):
        layers.append(nn.Sequential(nn.Linear(a, b), nn.Sigmoid()))
        nn.init.xavier_uniform_(layers[-1][0].weight)
    x, _ = S.vectors(seed, width=64)
    return once(nn.Sequential(*layers), (x, x.sigmoid()), S.squares)


@label("vanishing", family="squashed tanh")
def saturated_tanh_chain(seed):
    """12 tanh layers whose biases of 2 keep every unit near 0.96, where the slope is 0.07; in float64. Measured:
    output gradients 2.7e-15 at 0 and 0.013 at 13 (of 14), parameters' 5.3e-13 and 2; loss 1.72 -> 1.52 in 30 steps
    of Adam."""

    def make():
        layer = nn.Linear(48, 48)
        nn.init.constant_(layer.bias, 2.0)
        nn.init.xavier_normal_(layer.weight, gain=0.6)
        return nn.Sequential(layer, nn.Tanh())

    x, y = S.vectors(seed)
    model = stack(12, make).double()
    return once(model, (x.double(), y), lambda output, batch: F.cross_entropy(output, batch[-1]))


@label("vanishing", family="torchvision vgg19")
def vgg19_from_one_hundredth(seed):
    """VGG-19 of a quarter of its width with normal weights of 0.01, which its authors report not to train. Measured:
    output gradients 1.5e-16 at 0.0 and 0.0005 at 0.34 (of 35), parameters' 2.1e-13 and 0.082; loss 2.29 -> 1.8 in 30
    steps of Adam."""
    import torchvision

    plan = [16, 16, "M", 32, 32, "M", *[64] * 4, "M", *[128] * 4, *[128] * 4]
    body = torchvision.models.vgg.make_layers(plan)
    for layer in body:
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    return once(model, S.images(seed, size=32), S.cross_entropy)


@label("vanishing", family="timm vit without shortcuts")
def vision_transformer_whose_scales_left_the_sum(seed):
    """timm's ViT of 12 blocks whose forward returns the branch alone, times a LayerScale of 0.1, and ends without
    norm. Measured: output gradients 1.6e-64 at blocks.0 and 0.00074 at blocks.11 (of 12), parameters' 3.7e-63 and
    0.0033; loss 2.3 -> 2.28 in 30 steps of Adam."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=8, embed_dim=48, num_heads=4, init_values=0.1
    )
    for block in model.blocks:
        block.norm1, block.norm2 = nn.Identity(), nn.Identity()
        block.forward = lambda x, b=block: b.ls2(b.mlp(b.norm2(b.ls1(b.attn(b.norm1(x))))))
    model.norm = nn.Identity()
    return once(
        model.double(),
        tuple(v.double() if v.is_floating_point() else v for v in S.images(seed, size=32)),
        S.cross_entropy,
    )
