"""Sound networks on pictures: stages, pyramids, post-norms, talking heads, grouped and split convolutions."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

NEEDS = "timm transformers"
S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


def classes(output, batch):
    """Cross entropy of whatever a classifier returns."""
    scores = getattr(output, "logits", output)
    return F.cross_entropy(scores.float(), batch[-1])


TIMM = {
    "cait_xxs24_224": {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 48,
        "depth": 6,
        "num_heads": 4,
        "init_values": 0.1,
    },
    "beit_base_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 6, "num_heads": 4},
    "poolformer_s12": {},
    "pvt_v2_b0": {"embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 4, 4)},
    "ghostnet_050": {},
    "dpn48b": {},
    "seresnext26d_32x4d": {"zero_init_last": False},
}
ZEROED = {
    "swinv2_cr_tiny_224": {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 24, "depths": (2, 2, 2)},
    "levit_128s": {
        "img_size": 96,
        "embed_dim": (32, 48, 64),
        "key_dim": 8,
        "num_heads": (2, 3, 4),
        "depth": (2, 2, 2),
    },
    "mobilevit_xxs": {},
}


def from_timm(name, img_size=48, **options):
    """A classifier of timm and the size of its pictures."""
    timm = importlib.import_module("timm")
    fixed = {"img_size": img_size} if name.startswith(("cait", "beit", "swin", "levit")) else {}
    return timm.create_model(name, num_classes=10, **fixed, **options), img_size


@label("healthy", family="timm {name}", variants=tuple({"name": name} for name in TIMM))
def classifier_as_timm_starts_it(seed, name):
    """Classifiers of timm at small pictures, as the library starts them: layer scales of 0.1, which its paper gives
    for less than 18 layers, and two class layers (CaiT), layer scales, relative positions and a head times 0.001
    (BEiT), a pool for attention, a pyramid of attentions, cheap copies, two paths, groups that squeeze and excite,
    their last norm started at 1. Measured: cait_xxs24_224: output gradients 8.2e-05 at blocks.0 and 8.2e-05 at
    blocks.5 (of 6), parameters' 0.0025 and 0.0025; loss 2.37 -> 0.689 in 30 steps of Adam. beit_base_patch16_224:
    output gradients 1.4e-06 at blocks.0 and 1.4e-06 at blocks.5 (of 6), parameters' 4.8e-05 and 4.7e-05; loss 2.3
    -> 0.929 in 30 steps of Adam. poolformer_s12: output gradients 0.028 at stages.2.blocks.0 and 0.028 at
    stages.2.blocks.5 (of 6), parameters' 3.7 and 3.7; loss 2.21 -> 0.00011 in 30 steps of Adam. pvt_v2_b0: output
    gradients 0.00036 at stages.0 and 0.0012 at stages.3 (of 4), parameters' 0.15 and 0.64; loss 2.29 -> 0.515 in 30
    steps of Adam. ghostnet_050: output gradients 0.0052 at blocks.0 and 0.0007 at blocks.9 (of 10), parameters' 5.4
    and 0.61; loss 2.25 -> 1.25e-05 in 30 steps of Adam. dpn48b: output gradients 0.029 at features.conv1_1 and
    0.0012 at features.conv5_bn_ac (of 19), parameters' 35 and 0.21; loss 2.43 -> 0.000949 in 30 steps of Adam.
    seresnext26d_32x4d: output gradients 0.015 at conv1.0 and 0.0033 at conv1.6 (of 7), parameters' 20 and 13; loss
    2.34 -> 1.23e-05 in 30 steps of Adam."""
    model, size = from_timm(name, **TIMM[name])
    return once(model, S.images(seed, size=size, batch=4), classes)


@label("healthy", family="timm {name}", variants=tuple({"name": name} for name in ZEROED))
def classifier_whose_branches_start_at_zero(seed, name):
    """timm starts the last norm of each branch at 0, so that the stream is open and branches join from the second
    step on; three steps of SGD: norms behind branches and a scaled cosine (SwinV2), attention with batch norm
    (LeViT), convolutions around attention (MobileViT). Measured: swinv2_cr_tiny_224: output gradients 0.00043 at
    stages.0 and 0.0008 at stages.2 (of 3), parameters' 0.4 and 2; loss 2.18 -> 1.63. levit_128s: output gradients
    0.00074 at stem.conv1 and 0.00079 at stem.conv4 (of 7), parameters' 1 and 1.8; loss 2.4 -> 2.04. mobilevit_xxs:
    output gradients 0.0025 at stages.0 and 0.0012 at stages.4 (of 5), parameters' 0.36 and 0.67; loss 2.29 ->
    1.87."""
    model, size = from_timm(name, **ZEROED[name])
    batch = S.images(seed, size=size, batch=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return fit(model, lambda _: classes(model(batch[0]), batch), steps=3, optimizer=optimizer)


@label("healthy", family="transformers Cvt")
def attention_behind_convolutions(seed):
    """CvT: three stages, queries and keys through depthwise convolutions with batch norm, read at the mean.
    Measured: output gradients 0.0037 at body.encoder.stages.2.layers.0 and 0.0037 at body.encoder.stages.2.layers.3
    (of 4), parameters' 1.2 and 1.3; loss 2.3 -> 0.0643 in 30 steps of Adam."""
    from transformers import CvtConfig, CvtModel

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            plain = {"drop_path_rate": [0.0, 0.0, 0.0], "cls_token": [False, False, False]}
            self.body = CvtModel(CvtConfig(embed_dim=[16, 32, 48], num_heads=[1, 2, 4], depth=[1, 2, 4], **plain))
            self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 10)

        def forward(self, pictures):
            return self.head(self.norm(self.body(pictures).last_hidden_state.mean((2, 3))))

    return once(Reads(), S.images(seed, size=64, batch=4), classes)


def unit(inputs, outputs, size=3, stride=1):
    """Convolution, batch norm, ReLU."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Inception(nn.Module):
    """Four paths of kernels of 1, 3 and 5 and a pool, put side by side."""

    def __init__(self, inputs, each):
        super().__init__()
        self.one = unit(inputs, each, 1)
        self.three = nn.Sequential(unit(inputs, each // 2, 1), unit(each // 2, each))
        self.five = nn.Sequential(unit(inputs, each // 2, 1), unit(each // 2, each, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), unit(inputs, each, 1))

    def forward(self, x):
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


@label("healthy", family="inception")
def paths_of_four_kernels(seed):
    """GoogLeNet's modules, five of them with batch norm, as He starts them; 3 steps of SGD with Nesterov's momentum
    and smoothed labels. Measured: output gradients 0.00027 at 1 and 4.9e-05 at 5 (the modules; a mean over 256
    places follows); output gradients 0.0004 at 0 and 0.033 at 9 (of 10), parameters' 0.64 and 0.79; loss 2.43 ->
    2.24."""
    model = nn.Sequential(
        unit(3, 32),
        *[Inception(32, 8) for _ in range(5)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, 10),
    )
    pictures, kinds = S.images(seed, batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    return fit(
        model, lambda _: F.cross_entropy(model(pictures), kinds, label_smoothing=0.1), steps=3, optimizer=optimizer
    )


class Exchange(nn.Module):
    """HRNet's stage: two resolutions, two residual units each, then each takes the other's."""

    def __init__(self, width=16):
        super().__init__()
        self.high = nn.ModuleList(nn.Sequential(unit(width, width), nn.Conv2d(width, width, 3, 1, 1)) for _ in range(2))
        self.low = nn.ModuleList(nn.Sequential(unit(width, width), nn.Conv2d(width, width, 3, 1, 1)) for _ in range(2))
        self.down, self.up = unit(width, width, 3, 2), unit(width, width, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, streams):
        high, low = streams
        for one, other in zip(self.high, self.low, strict=True):
            high, low = F.relu(high + one(high)), F.relu(low + other(low))
        fused = high + F.interpolate(self.up(low), scale_factor=2), low + self.down(high)
        return self.norms[0](fused[0]), self.norms[1](fused[1])


@label("healthy", family="two resolutions")
def resolutions_side_by_side(seed):
    """HRNet in small: four stages that keep two resolutions and fuse them, heat maps as targets. Measured: output
    gradients 0.00022 at stages.0 and 7.6e-05 at stages.3 (of 4), parameters' 1.9 and 1.1; loss 0.617 -> 0.0237 in
    30 steps of Adam."""

    class High(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.lower = unit(3, 16), unit(16, 16, 3, 2)
            self.stages = nn.ModuleList(Exchange() for _ in range(4))
            self.head = nn.Conv2d(32, 2, 1)

        def forward(self, x):
            high = self.stem(x)
            streams = high, self.lower(high)
            for stage in self.stages:
                streams = stage(streams)
            return self.head(torch.cat([streams[0], F.interpolate(streams[1], scale_factor=2)], dim=1))

    pictures, _ = S.images(seed)
    return once(High(), (pictures, pictures[:, :2].tanh()), S.squares)


class Pyramid(nn.Module):
    """A bottom-up way of four residual stages, a top-down way of sums, one shared head on three levels."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = unit(3, width)
        self.stages = nn.ModuleList(nn.Sequential(unit(width, width, 3, 2), unit(width, width)) for _ in range(3))
        self.across = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(3))
        self.head = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, 5, 1))

    def forward(self, x):
        x, levels = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        top, outputs = None, []
        for k in (2, 1, 0):
            side = self.across[k](levels[k])
            top = side if top is None else side + F.interpolate(top, scale_factor=2)
            outputs.append(self.head(self.smooth[k](top)).flatten(2))
        return torch.cat(outputs, dim=2)


@label("healthy", family="feature pyramid")
def pyramid_with_a_shared_head(seed):
    """A feature pyramid as RetinaNet has it: the head sees three levels, with the focal loss and its bias that
    makes objects rare, two steps of Adam. Measured: output gradients 0.00053 at stem.0 and 0.00031 at stem.2 (of
    3), parameters' 0.51 and 0.07; loss 4.52 -> 4.42."""
    model, (pictures, kinds) = Pyramid(), S.images(seed, size=32)
    nn.init.constant_(model.head[-1].bias, -4.6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(_):
        scores = model(pictures)
        wanted = torch.zeros_like(scores)
        wanted[torch.arange(6), kinds % 5, kinds] = 1.0
        chance = scores.sigmoid()
        right = torch.where(wanted > 0, chance, 1 - chance)
        each = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        return ((1 - right).square() * each).sum() / 6

    return fit(model, loss, steps=2, optimizer=optimizer)


class Nested(nn.Module):
    """U-Net++ of three levels: every skip passes units of its own, and each of the upper ones is judged."""

    def __init__(self, width=12):
        super().__init__()
        self.first = nn.ModuleList([unit(3, width), unit(width, width), unit(width, width)])
        self.second = nn.ModuleList([unit(2 * width, width), unit(2 * width, width)])
        self.third = unit(3 * width, width)
        self.heads = nn.ModuleList(nn.Conv2d(width, 3, 1) for _ in range(2))

    def forward(self, x):
        a = self.first[0](x)
        b = self.first[1](F.max_pool2d(a, 2))
        c = self.first[2](F.max_pool2d(b, 2))
        upper = self.second[0](torch.cat([a, F.interpolate(b, scale_factor=2)], dim=1))
        lower = self.second[1](torch.cat([b, F.interpolate(c, scale_factor=2)], dim=1))
        last = self.third(torch.cat([a, upper, F.interpolate(lower, scale_factor=2)], dim=1))
        return self.heads[0](upper), self.heads[1](last)


@label("healthy", family="nested u-net")
def nested_skips_with_deep_supervision(seed):
    """U-Net++: two of its outputs are judged and both losses averaged. Measured: output gradients 0.0001 at first.0
    and 0.00017 at first.2 (of 3), parameters' 0.18 and 0.11; loss 0.904 -> 0.383 in 30 steps of Adam."""
    pictures, _ = S.images(seed)
    return once(
        Nested(),
        (pictures, pictures.abs().sqrt()),
        lambda output, batch: sum((part - batch[-1]).square().mean() for part in output) / 2,
    )
