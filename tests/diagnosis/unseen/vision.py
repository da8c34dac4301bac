"""Sound models of torchvision, timm and transformers on pictures, and dense prediction written by hand."""

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


def classes(output, batch):
    """Cross entropy of whole pictures."""
    return F.cross_entropy(output.float(), batch[-1])


@label(
    "healthy",
    family="torchvision {name}",
    variants=(
        {"name": "resnet18", "size": 32},
        {"name": "mobilenet_v3_small", "size": 48},
        {"name": "densenet121", "size": 32},
        {"name": "shufflenet_v2_x0_5", "size": 48},
        {"name": "squeezenet1_1", "size": 48},
    ),
)
def torchvision_classifier(seed, name, size):
    """A classifier as torchvision initialises it, in training mode with batch norm over 8 pictures. Measured:
    resnet18: loss 2.66 -> 0.000113 in 30 steps of Adam. mobilenet_v3_small: output gradients 0.00027 at features.0
    and 5.2e-05 at features.12 (of 13), parameters' 0.24 and 0.084; loss 2.31 -> 6.96e-05 in 30 steps of Adam.
    densenet121: output gradients 0.0052 at features.conv0 and 0.0016 at features.norm5 (of 12), parameters' 21 and
    0.19; loss 2.57 -> 0.00106 in 30 steps of Adam. shufflenet_v2_x0_5: output gradients 0.06 at stage2.0.branch2.0
    and 0.036 at stage2.0.branch2.7 (of 8), parameters' 26 and 1.9; loss 2.27 -> 0.00126 in 30 steps of Adam.
    squeezenet1_1: output gradients 3.2e-05 at features.0 and 0.0003 at features.12 (of 13), parameters' 0.083 and 1;
    loss 2.34 -> 1.29 in 30 steps of Adam."""
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=10)
    return once(model, S.images(seed, size=size, batch=8), classes)


@label("healthy", family="torchvision efficientnet")
def efficientnet_after_steps(seed):
    """EfficientNet-B0 with stochastic depth, 3 steps of SGD with momentum and clipping. Measured: output gradients
    0.074 at features.0 and 0.0074 at features.8 (of 9), parameters' 1.2 and 0.18; loss 4.7 -> 3.72."""
    import torchvision

    model = torchvision.models.efficientnet_b0(num_classes=10)
    pictures, kinds = S.images(seed, size=64, batch=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return fit(model, lambda _: F.cross_entropy(model(pictures), kinds), steps=3, optimizer=optimizer, clip=5.0)


@label(
    "healthy",
    family="timm {name}",
    variants=(
        {"name": "convnext_atto", "options": {"depths": (2, 2, 4, 2), "dims": (16, 32, 64, 96)}},
        {"name": "xcit_nano_12_p16_224", "options": {"img_size": 32, "depth": 6, "embed_dim": 48}},
        {"name": "edgenext_xx_small", "options": {}},
        {"name": "nf_resnet26", "options": {}},
    ),
)
def timm_classifier(seed, name, options):
    """A classifier as timm initialises it, some cut down in width and depth. Measured: convnext_atto: output
    gradients 0.00062 at stages.0 and 0.0073 at stages.3 (of 4), parameters' 0.00057 and 3.3; loss 2.31 -> 0.139 in
    30 steps of Adam. xcit_nano_12_p16_224: output gradients 0.00022 at patch_embed.proj.0 and 0.00034 at
    patch_embed.proj.6 (of 7), parameters' 0.2 and 0.32; loss 2.25 -> 0.698 in 30 steps of Adam. edgenext_xx_small:
    output gradients 0.0056 at stages.2.blocks.0 and 0.0056 at stages.2.blocks.5 (of 6), parameters' 0.0087 and
    0.0078; loss 2.37 -> 0.0269 in 30 steps of Adam. nf_resnet26: output gradients 5.9e-05 at stages.0 and 0.00085 at
    stages.3 (of 4), parameters' 0.83 and 2.3; 56 of 89 parameters get exactly 0; loss 2.4 -> 0 in 30 steps of Adam.
    """
    import timm

    model = timm.create_model(name, num_classes=10, **options)
    return once(model, S.images(seed, size=options.get("img_size", 32), batch=8), classes)


@label("healthy", family="timm mlp {gate}", variants=({"gate": "mixer"}, {"gate": "gmlp"}, {"gate": "resmlp"}))
def perceptrons_on_patches(seed, gate):
    """MLP-Mixer, gMLP (spatial gates that start at 1) and ResMLP of 8 blocks, after 5 steps: timm starts their heads
    at 0, so that a first step would reach the head alone. Measured: mixer: output gradients 2.3e-05 at blocks.0 and
    1e-05 at blocks.7 (of 8), parameters' 0.03 and 0.028; loss 2.11 -> 0.665 in 30 steps of Adam. gmlp: output
    gradients 2.9e-05 at blocks.0 and 1.4e-05 at blocks.7 (of 8), parameters' 0.018 and 0.014; loss 2.11 -> 0.665 in
    30 steps of Adam. resmlp: output gradients 4.1e-05 at blocks.0 and 4e-05 at blocks.7 (of 8), parameters' 0.013
    and 0.01; loss 2.14 -> 0.154 in 30 steps of Adam."""
    from timm.layers import GatedMlp
    from timm.models import mlp_mixer

    parts = {
        "mixer": {},
        "gmlp": {"block_layer": mlp_mixer.SpatialGatingBlock, "mlp_layer": GatedMlp, "mlp_ratio": 4},
        "resmlp": {"block_layer": mlp_mixer.ResBlock, "mlp_ratio": 4, "norm_layer": mlp_mixer.Affine},
    }[gate]
    model = mlp_mixer.MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=8, embed_dim=64, **parts)
    batch = S.images(seed, size=32, batch=8)
    S.settle(model, batch, classes, steps=5)
    return once(model, batch, classes)


@label("healthy", family="transformers swin")
def swin_of_three_stages(seed):
    """Swin: shifted windows, 2, 2 and 4 pre-norm blocks, patches merged between stages. Measured: output gradients
    0.0013 at swin.encoder.layers.2.blocks.0 and 0.0012 at swin.encoder.layers.2.blocks.3 (of 4), parameters' 0.91
    and 0.79; loss 2.34 -> 0.108 in 30 steps of Adam."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=24, depths=[2, 2, 4], num_heads=[2, 4, 8], window_size=4, num_labels=10
    )
    pictures, kinds = S.images(seed, size=32, batch=4)
    return once(SwinForImageClassification(config), {"pixel_values": pictures, "labels": kinds}, None)


@label("healthy", family="transformers segformer")
def segformer_for_every_pixel(seed):
    """Segformer: four stages of efficient attention, a light decoder, one class for each pixel. Measured: output
    gradients 5.5e-05 at segformer.stages.0 and 0.00017 at segformer.stages.3 (of 4), parameters' 0.65 and 0.33; loss
    1.6 -> 0.562 in 30 steps of Adam."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(depths=[2, 2, 2, 2], hidden_sizes=[16, 32, 48, 64], decoder_hidden_size=64, num_labels=5)
    pictures, _ = S.images(seed, size=64, batch=4)
    shade = pictures.mean(1)
    return once(
        SegformerForSemanticSegmentation(config),
        {"pixel_values": pictures, "labels": (shade > 0).long() + 2 * (shade > 1).long()},
        None,
    )


@label("healthy", family="transformers vit mae")
def masked_autoencoder_of_pictures(seed):
    """ViT-MAE: the encoder sees a quarter of the patches, a decoder of 3 layers paints the rest. Measured: output
    gradients 0.00097 at vit.layers.0 and 0.00057 at vit.layers.5 (of 6), parameters' 0.44 and 0.3; 2 of 158
    parameters are frozen; loss 1.01 -> 0.968 in 30 steps of Adam."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        image_size=32, patch_size=4, hidden_size=48, num_hidden_layers=6, num_attention_heads=4, intermediate_size=96,
        decoder_hidden_size=32, decoder_num_hidden_layers=3, decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    )  # fmt: skip
    return once(ViTMAEForPreTraining(config), {"pixel_values": S.images(seed, size=32)[0]}, None)


@label("healthy", family="transformers dinov2")
def dinov2_with_layer_scale(seed):
    """DINOv2: 6 pre-norm blocks with LayerScale at 1 as released, classes from the class token and the mean patch.
    Measured: output gradients 0.021 at dinov2.encoder.layer.0 and 0.016 at dinov2.encoder.layer.5 (of 6),
    parameters' 1.8 and 1.6; 1 of 117 parameters are frozen; loss 2.36 -> 0.386 in 30 steps of Adam."""
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(
        image_size=32,
        patch_size=8,
        hidden_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        mlp_ratio=2,
        num_labels=10,
    )
    pictures, kinds = S.images(seed, size=32)
    model = Dinov2ForImageClassification(config)
    model.dinov2.embeddings.mask_token.requires_grad_(requires_grad=False)  # nothing is masked here
    return once(model, {"pixel_values": pictures, "labels": kinds}, None)


class UNet(nn.Module):
    """Down three times, up three times, with skips by concatenation; group norm."""

    def __init__(self, width=16, levels=3, outputs=1):
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.entry = self.double(3, width)
        self.down = nn.ModuleList(self.double(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(self.double(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=False))
        self.exit = nn.Conv2d(width, outputs, 1)

    @staticmethod
    def double(a, b):
        """Two convolutions with their norms."""
        layers = []
        for source in (a, b):
            layers += [nn.Conv2d(source, b, 3, padding=1, bias=False), nn.GroupNorm(4, b), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x):
        kept = [self.entry(x)]
        for block in self.down:
            kept.append(block(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        return self.exit(x)


@label("healthy", family="unet")
def unet_that_segments(seed):
    """A U-Net with group norm that finds the bright half of a picture, dice and cross entropy in equal parts.
    Measured: output gradients 8.8e-05 at entry.0 and 5.7e-05 at entry.5 (of 6), parameters' 0.34 and 0.06; loss 1.05
    -> 0.44 in 30 steps of Adam."""

    def loss(output, batch):
        chance = output.sigmoid()
        overlap = 2 * (chance * batch[-1]).sum() / (chance.sum() + batch[-1].sum() + 1)
        return F.binary_cross_entropy_with_logits(output, batch[-1]) + 1 - overlap

    pictures, _ = S.images(seed, size=32)
    return once(UNet(), (pictures, (pictures.mean(1, keepdim=True) > 0).float()), loss)


class Detector(nn.Module):
    """DETR in small: a convolutional stem, an encoder and decoder of torch, learned queries for boxes and kinds."""

    def __init__(self, width=48, queries=6, kinds=4):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, width, 3, 2, 1),
            nn.BatchNorm2d(width),
        )
        self.places = nn.Parameter(torch.randn(64, width) * 0.1)
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.core = nn.Transformer(width, 4, 4, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.boxes, self.kinds = nn.Linear(width, 4), nn.Linear(width, kinds)

    def forward(self, pictures):
        seen = self.stem(pictures).flatten(2).mT + self.places
        found = self.core(seen, self.queries.expand(len(pictures), -1, -1))
        return self.boxes(found).sigmoid(), self.kinds(found)


@label("healthy", family="detr")
def detector_with_queries(seed):
    """A small DETR with pre-norm layers; boxes by L1, kinds by cross entropy, matched in order. Measured: output
    gradients 0.0004 at stem.0 and 0.0002 at stem.4 (of 5), parameters' 0.46 and 0.2; loss 2.61 -> 0.803 in 30 steps
    of Adam."""
    generator = S.generator_of(seed)
    boxes, kinds = torch.rand(6, 6, 4, generator=generator), torch.randint(4, (6, 6), generator=generator)

    def loss(output, batch):
        return 5 * (output[0] - boxes).abs().mean() + F.cross_entropy(output[1].flatten(0, 1), kinds.flatten())

    return once(Detector(), (S.images(seed, size=32)[0], kinds), loss)
