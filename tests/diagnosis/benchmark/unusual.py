"""Sound models of unusual shape, which rules of thumb take for sick, and sick ones that look sound at first sight."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from keelscope import models

HERE = Path(__file__).parent
kit = SimpleNamespace(**runpy.run_path(str(HERE / "labels.py")))
nets = SimpleNamespace(**runpy.run_path(str(HERE / "plain.py")))
label = kit.label


class Shared(nn.Module):
    """One block called again and again."""

    def __init__(self, calls=8, width=24):
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(width, width), nets.Block(width), nn.Linear(width, 5)
        self.calls = calls

    def forward(self, x):
        x = self.stem(x)
        for _ in range(self.calls):
            x = self.block(x)
        return self.head(x)


@label("healthy", family="shared block", seeds=(0, 1))
def one_block_called_eight_times(seed):
    """ALBERT shares one block: depth lies in the calls, whose shortcut passes the gradient on."""
    return nets.judged(Shared(), seed)


class UNet(nn.Module):
    """Down, down, middle, up, up, with skips that concatenate."""

    def __init__(self, width=8):
        super().__init__()
        sizes = [(3, width), (width, 2 * width), (2 * width, 4 * width)]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in sizes)
        self.middle = nn.Conv2d(4 * width, 4 * width, 3, padding=1)
        sizes = [(8 * width, 2 * width), (4 * width, width), (2 * width, width)]
        self.up = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in sizes)
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        kept = []
        for layer in self.down:
            x = layer(x).relu()
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x).relu()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1)).relu()
        return self.head(x)


@label("healthy", family="unet", seeds=(0, 1))
def unet_with_skips(seed):
    """A U-Net at He gain: every level is one skip away from the loss."""
    pictures, _ = kit.images(seed)
    return kit.once(nets.normal(UNet(), 2**0.5), (pictures, pictures), kit.squares)


@label("healthy", family="autoencoder", seeds=(0, 1))
def autoencoder_with_bottleneck(seed):
    """Widths 64, 32, 16, 8 and back: layers of very different size at He gain."""
    sizes = [64, 48, 32, 16, 8, 16, 32, 48, 64]
    parts = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())][:-1]
    x, _ = kit.vectors(seed, width=64)
    return kit.once(nets.normal(nn.Sequential(*parts), 2**0.5), (x, x), kit.squares)


@label("healthy", family="dropout", seeds=(0, 1))
def residual_mlp_with_dropout(seed):
    """Half of the entries of each branch are dropped: their gradients are 0, by intent."""
    model = nets.Residual(10)
    for block in model.blocks:
        block.first = nn.Sequential(block.first, nn.Dropout(0.5))
    return nets.judged(model, seed)


@label("healthy", family="checkpointed", seeds=(0, 1))
def checkpointed_blocks(seed):
    """Activation checkpoints run every block twice; the numbers are those of one run."""

    class Checkpointed(nets.Residual):
        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return nets.judged(Checkpointed(10), seed)


@label("healthy", family="autocast", seeds=(0, 1))
def residual_mlp_under_autocast(seed):
    """Forward in bfloat16 under autocast, parameters in float32."""

    class Cast(nets.Residual):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    return nets.judged(Cast(12), seed)


@label("healthy", family="float64", seeds=(0,))
def residual_mlp_in_float64(seed):
    """Double precision changes nothing."""
    x, y = kit.vectors(seed)
    return kit.once(nets.Residual(12).double(), (x.double(), y), kit.cross_entropy)


@label("healthy", family="one example", seeds=(0, 1), variants=[{"scheme": "keel"}, {"scheme": "pre_ln"}])
def batch_of_one(seed, scheme):
    """One sequence in the batch."""
    model = models.build(scheme, seed=seed, depth=12, width=32)
    return kit.once(model, kit.text(seed, sequences=1), kit.cross_entropy)


@label("healthy", family="mixture of experts", seeds=(0, 1), variants=[{"experts": 4}])
def experts(seed, experts):
    """A router sends each token to two of four experts."""
    model = models.build("pre_ln", seed=seed, depth=8, width=32, experts=experts)
    return kit.once(model, kit.text(seed), kit.cross_entropy)


@label("healthy", family="many experts", seeds=(0, 1))
def experts_without_a_token(seed):
    """Sixteen experts for eight tokens: some get none on this step, which routing means."""
    model = models.build("pre_ln", seed=seed, depth=8, width=16, heads=2, experts=16, experts_per_token=1)
    return kit.once(model, kit.text(seed, sequences=1, length=8), kit.cross_entropy)


@label("healthy", family="two calls", seeds=(0, 1))
def siamese_pair(seed):
    """The same network on two inputs, the second without gradient, as in SimSiam."""

    class Pair(nets.Residual):
        def forward(self, x):
            scores = super().forward(x)
            with torch.no_grad():
                target = super().forward(x.flip(0))
            return scores - target

    return nets.judged(Pair(10), seed)


@label("healthy", family="auxiliary heads", seeds=(0, 1))
def heads_at_several_depths(seed):
    """Deep supervision: a head after each third block, all in the loss."""

    class Supervised(nets.Residual):
        def __init__(self):
            super().__init__(12)
            self.heads = nn.ModuleList(nn.Linear(24, 5) for _ in range(4))

        def forward(self, x):
            x, out = self.stem(x), 0
            for i, block in enumerate(self.blocks):
                x = block(x)
                out = out + self.heads[i // 3](x) if i % 3 == 2 else out
            return self.head(x) + out

    return nets.judged(Supervised(), seed)


@label("healthy", family="frozen embedding", seeds=(0, 1), findings={"frozen": ["embedding"]})
def frozen_embedding(seed):
    """Pretrained token vectors that do not train."""
    model = models.build("pre_ln", seed=seed, depth=12, width=32)
    model.embedding.requires_grad_(requires_grad=False)
    return kit.once(model, kit.text(seed), kit.cross_entropy)


@label("healthy", family="last token", seeds=(0, 1), variants=[{"scheme": "pre_ln"}, {"scheme": "deepnorm"}])
def loss_on_the_last_token(seed, scheme):
    """A reward model reads the last position only: other positions get their gradient through attention."""
    model = models.build(scheme, seed=seed, depth=12, width=32)
    return kit.once(model, kit.text(seed), lambda out, b: F.cross_entropy(out[:, -1], b[-1][:, -1]))


@label("healthy", family="first token", seeds=(0, 1))
def loss_on_a_class_token(seed):
    """An encoder read at its first token: later positions get no gradient at the top, by design."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, 32), encoder, nn.Linear(32, 256))
    return kit.once(model, kit.text(seed), lambda out, b: F.cross_entropy(out[:, 0], b[-1][:, 0]))


@label("healthy", family="squared relu", seeds=(0, 1))
def squared_relu(seed):
    """Primer's squared ReLU: half of the units are silent on each input, as they should be."""

    class Squared(nets.Block):
        def forward(self, x):
            return x + self.second(self.first(self.norm(x)).relu().square())

    model = nets.Residual(12)
    model.blocks = nn.ModuleList(Squared(24) for _ in range(12))
    return nets.judged(model, seed)


@label("healthy", family="converged", seeds=(0, 1))
def loss_near_its_minimum(seed):
    """Four examples learned by heart: gradients are small because nothing is left to learn."""
    x, y = kit.vectors(seed, batch=4)
    return kit.train(nets.Residual(6), (x, y), kit.cross_entropy, steps=40, rate=0.1)


# --- sick, and sound at first sight ----------------------------------------------------------------------------------


@label("vanishing", family="transformer without shortcuts", seeds=(0, 1))
def transformer_without_shortcuts(seed):
    """Attention and feed-forward one after the other, averaging at each: without a shortcut nothing keeps the gradient.

    Feed-forward branches at std 0.02 and width 32 have a gain far below 0.1, and each stands in the only path.
    """

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

        def forward(self, x):
            return self.inner(x)

    layers = nn.Sequential(nn.Embedding(256, 32), *[Plain() for _ in range(10)], nn.Linear(32, 256))
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    return kit.once(layers, kit.text(seed), kit.cross_entropy)


@label(
    "healthy",
    healthy=False,
    family="dead branch",
    seeds=(0, 1),
    findings={"dead_units": ["blocks.4.first"]},
)
def dead_branch(seed):
    """All ReLUs of one branch are closed, over 3 steps: the shortcut carries the gradient past, the branch is dead.

    The weight behind the closed units sees an input of 0; its bias still trains.
    """
    model = nets.Residual(10)
    nn.init.constant_(model.blocks[4].first.bias, -100.0)
    return kit.train(model, kit.vectors(seed), kit.cross_entropy, steps=3)


@label(
    "healthy", healthy=False, family="under no_grad", seeds=(0, 1), findings={"disconnected": ["blocks.2", "blocks.3"]}
)
def two_branches_under_no_grad(seed):
    """Branches of two blocks are computed under no_grad by mistake, the shortcut is not."""

    class Quiet(nets.Block):
        def forward(self, x):
            with torch.no_grad():
                branch = self.second(self.first(self.norm(x)).relu())
            return x + branch

    model = nets.Residual(10)
    for i in (2, 3):
        model.blocks[i] = Quiet(24)
    return nets.judged(model, seed)


@label("exploding", family="trained into chaos", seeds=(0, 1))
def exploding_during_all_recorded_steps(seed):
    """Weights at gain 2.5 without norms over 3 steps with a learning rate of 0."""
    model = nets.normal(nets.mlp(16, "relu", width=48), 2.5)
    return kit.train(model, kit.vectors(seed, width=48), kit.cross_entropy, steps=3, rate=0.0)


@label("dead", family="everything detached", seeds=(0, 1))
def output_of_the_stack_detached(seed):
    """Features are detached before the head, by mistake: only the head trains."""

    class Loose(nets.Residual):
        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.detach())

    return nets.judged(Loose(10), seed)


@label("healthy", healthy=False, family="double softmax", seeds=(0, 1), findings={"uniformly_small": []})
def softmax_twice_and_confident(seed):
    """Softmax in the model and in the loss, scores 40 apart: the inner one is flat, gradients are 1e-17 everywhere."""

    class Twice(nets.Residual):
        def forward(self, x):
            return super().forward(x).softmax(-1)

    model = Twice(10)
    with torch.no_grad():
        model.head.bias[0] = 40.0
    x, _ = kit.vectors(seed)
    return kit.once(model, (x, torch.ones(32, dtype=torch.int64)), kit.cross_entropy)


@label("non-finite", family="attention overflow", seeds=(0, 1), findings={"nonfinite_forward": ["layers.2"]})
def query_without_any_key(seed):
    """A mask of -Inf over all keys of one query in the third layer: a softmax written by hand gives NaN."""

    class Attention(nn.Module):
        def __init__(self, masked):
            super().__init__()
            self.value, self.masked = nn.Linear(32, 32), masked

        def forward(self, x):
            scores = x @ x.mT / 32
            if self.masked:
                scores[:, 3] = -torch.inf
            return x + scores.softmax(-1) @ self.value(x)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
            self.layers = nn.ModuleList(Attention(i == 2) for i in range(6))

        def forward(self, x):
            x = self.embedding(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return kit.once(Masked(), kit.text(seed), kit.cross_entropy)
