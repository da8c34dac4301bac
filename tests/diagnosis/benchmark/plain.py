"""Plain and residual networks of torch layers: what their initialisation and their parts make of the gradient."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

kit = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("labels.py"))))
label = kit.label

ACTIVATIONS = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "none": nn.Identity,
}


def mlp(depth, activation, *, width=24, norm=None, classes=5):
    """`depth` times linear, norm and activation, and a linear head: modules of one flat Sequential."""
    parts = []
    for _ in range(depth):
        parts += [nn.Linear(width, width), *([norm(width)] if norm else []), ACTIVATIONS[activation]()]
    return nn.Sequential(*parts, nn.Linear(width, classes))


def normal(model, gain):
    """Weights N(0, gain^2 / fan_in), biases 0."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=gain / fan_in**0.5)
            nn.init.zeros_(module.bias)
    return model


def orthogonal(model):
    """Orthogonal weights, biases 0."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            nn.init.zeros_(module.bias)
    return model


def linears(depth, *, every=2):
    """Paths of the linear layers of `mlp`, without the head."""
    return [str(every * i) for i in range(depth)]


def judged(model, seed, width=24):
    """One pass on normal vectors with classes."""
    return kit.once(model, kit.vectors(seed, width=width), kit.cross_entropy)


@label("healthy", family="relu mlp", seeds=(0, 1, 2), variants=[{"depth": 10}])
def relu_mlp_at_he_gain(seed, depth):
    """He et al.: a gain of sqrt(2) keeps the gradient level through ReLU; at width 64 it strays little."""
    return judged(normal(mlp(depth, "relu", width=64), 2**0.5), seed, width=64)


@label("flat", family="orthogonal linear", seeds=(0, 1), variants=[{"depth": 30}])
def deep_orthogonal_linear(seed, depth):
    """Products of orthogonal matrices are orthogonal: exactly level at any depth (Saxe et al.)."""
    return judged(orthogonal(mlp(depth, "none")), seed)


@label("healthy", family="tanh mlp", seeds=(0, 1), variants=[{"depth": 8}])
def shallow_tanh_mlp(seed, depth):
    """Xavier gain 1 over 8 tanh layers: a factor of about 0.8 each at first, closer to 1 as signals shrink."""
    return judged(normal(mlp(depth, "tanh"), 1.0), seed)


@label("healthy", family="selu mlp", seeds=(0, 1), variants=[{"depth": 16}])
def selu_mlp(seed, depth):
    """Self-normalising: LeCun gain 1 keeps variance and gradient near 1 (Klambauer et al.)."""
    return judged(normal(mlp(depth, "selu", width=64), 1.0), seed, width=64)


@label("healthy", family="layer-norm mlp", seeds=(0, 1), variants=[{"depth": 10}])
def layer_norm_mlp(seed, depth):
    """LayerNorm after each linear layer, GELU: signals are kept at 1, gains of the backward pass near 1."""
    return judged(normal(mlp(depth, "gelu", norm=nn.LayerNorm), 1.0), seed)


@label("healthy", family="batch-norm mlp", seeds=(0, 1), variants=[{"depth": 8}])
def shallow_batch_norm_mlp(seed, depth):
    """BatchNorm with ReLU grows the gradient by 1.21 per layer (Yang et al.): 0.7 decades over 8."""
    return judged(mlp(depth, "relu", norm=nn.BatchNorm1d), seed)


class Block(nn.Module):
    """x + scale * W2 relu(W1 norm(x))."""

    def __init__(self, width, *, norm=nn.LayerNorm, scale=1.0):
        super().__init__()
        self.norm = norm(width) if norm else nn.Identity()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = scale

    def forward(self, x):
        return x + self.scale * self.second(self.first(self.norm(x)).relu())


class Residual(nn.Module):
    """A stem, a stack of blocks and a head."""

    def __init__(self, depth, *, width=24, classes=5, norm=nn.LayerNorm, scale=1.0):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, norm=norm, scale=scale) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@label("healthy", family="residual mlp", seeds=(0, 1, 2), variants=[{"depth": 12}, {"depth": 24}])
def residual_mlp(seed, depth):
    """Pre-norm residual blocks at torch's default initialisation: the shortcut passes the gradient unchanged."""
    return judged(Residual(depth), seed)


@label("healthy", family="scaled residual mlp", seeds=(0, 1), variants=[{"depth": 16}])
def scaled_residual_mlp_without_norm(seed, depth):
    """No norm, but branches scaled by 1/sqrt(L): the sum of their powers is bounded."""
    return judged(normal(Residual(depth, norm=None, scale=depth**-0.5), 1.0), seed)


@label("exploding", family="unscaled residual mlp", seeds=(0, 1), variants=[{"depth": 24}])
def unscaled_residual_mlp_without_norm(seed, depth):
    """No norm, He gain in both matrices: power times 3 per block, forward and backward, 5.7 decades over 24."""
    return judged(normal(Residual(depth, norm=None), 2**0.5), seed)


class Pictures(nn.Module):
    """Plain convolutions with pooling at the end."""

    def __init__(self, depth, *, norm=None, width=12, skip=False):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(norm(width) for _ in range(depth if norm else 0))
        self.head = nn.Linear(width, 10)
        self.skip = skip

    def forward(self, x):
        x = self.stem(x)
        for i, layer in enumerate(self.layers):
            y = layer(x)
            y = self.norms[i](y) if len(self.norms) else y
            x = x + y.relu() if self.skip else y.relu()
        return self.head(x.mean((2, 3)))


@label("healthy", family="cnn", seeds=(0, 1), variants=[{"depth": 8}])
def plain_cnn_at_he_gain(seed, depth):
    """He gain: level through ReLU convolutions, up to what padding takes at the border."""
    return kit.once(normal(Pictures(depth, width=24), 2**0.5), kit.images(seed), kit.cross_entropy)


@label("healthy", family="batch-norm cnn", seeds=(0, 1), variants=[{"depth": 6}])
def batch_norm_cnn(seed, depth):
    """A few convolutions with BatchNorm and ReLU, as everywhere."""
    return kit.once(Pictures(depth, norm=nn.BatchNorm2d), kit.images(seed), kit.cross_entropy)


@label("healthy", family="residual cnn", seeds=(0, 1), variants=[{"depth": 12}])
def residual_cnn(seed, depth):
    """Convolutions with BatchNorm inside a residual sum: power grows linearly, the gradient by its square root."""
    return kit.once(Pictures(depth, norm=nn.BatchNorm2d, skip=True), kit.images(seed), kit.cross_entropy)


class Recurrent(nn.Module):
    """Layers of a recurrent cell over a sequence, each with a residual sum."""

    def __init__(self, depth, *, kind=nn.GRU, width=16):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(kind(width, width, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


@label("healthy", family="{kind}", seeds=(0, 1), variants=[{"kind": "GRU"}, {"kind": "LSTM"}])
def residual_recurrent_stack(seed, kind):
    """Six recurrent layers with residual sums over 24 positions: the shortcut passes the gradient down the stack."""
    return kit.once(Recurrent(6, kind=getattr(nn, kind)), kit.text(seed), kit.cross_entropy)


@label("healthy", family="torch encoder", seeds=(0, 1), variants=[{"norm_first": True}, {"norm_first": False}])
def torch_encoder(seed, norm_first):
    """Six layers of nn.TransformerEncoder at Xavier initialisation; Post-LN loses less than a decade over twelve."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return kit.once(
        nn.Sequential(nn.Embedding(256, 32), encoder, nn.Linear(32, 256)), kit.text(seed), kit.cross_entropy
    )


# --- sick by initialisation or depth ---------------------------------------------------------------------------------


@label("vanishing", family="linear", seeds=(0, 1), variants=[{"depth": 30}])
def deep_linear_of_gain_half(seed, depth):
    """Orthogonal matrices times 1/2: exactly 0.3 decades per layer, 9 over 30."""
    model = orthogonal(mlp(depth, "none"))
    with torch.no_grad():
        for path in linears(depth):
            model[int(path)].weight *= 0.5
    return judged(model, seed)


@label("vanishing", family="sigmoid mlp", seeds=(0, 1), variants=[{"depth": 12}, {"depth": 20}])
def sigmoid_mlp(seed, depth):
    """The slope of a sigmoid is at most 1/4: at gain 1 at least 0.6 decades per layer."""
    return judged(normal(mlp(depth, "sigmoid"), 1.0), seed)


@label("vanishing", family="deep tanh mlp", seeds=(0, 1), variants=[{"depth": 24}])
def tanh_mlp_with_small_weights(seed, depth):
    """Gain 0.6: below the edge of chaos (gain 1) signal and gradient shrink by it, 0.22 decades per layer."""
    return judged(normal(mlp(depth, "tanh"), 0.6), seed)


@label("exploding", family="chaotic tanh mlp", seeds=(0, 1), variants=[{"depth": 40}])
def tanh_mlp_with_large_weights(seed, depth):
    """Gain 3: the chaotic phase. The mean square slope times 9 is 1.86: 0.135 decades per layer, 5.4 over 40.

    Schoenholz et al.: q* = 6.3 solves q = 9 E tanh^2(sqrt(q) z), chi = 9 E sech^4(sqrt(q) z) = 1.86.
    """
    return judged(normal(mlp(depth, "tanh", width=64), 3.0), seed, width=64)


@label("vanishing", family="default relu mlp", seeds=(0, 1), variants=[{"depth": 20}])
def deep_relu_mlp_at_torch_default(seed, depth):
    """nn.Linear starts at gain sqrt(1/3): with ReLU a factor of sqrt(1/6) per layer, 0.39 decades, 7.8 over 20."""
    return judged(mlp(depth, "relu", width=48), seed, width=48)


@label("exploding", family="relu mlp of gain 3", seeds=(0, 1), variants=[{"depth": 16}])
def relu_mlp_with_large_weights(seed, depth):
    """Gain 3 where sqrt(2) is level: a factor of 2.1 per layer, 5.2 decades over 16."""
    return judged(normal(mlp(depth, "relu", width=48), 3.0), seed, width=48)


@label("exploding", family="deep batch-norm mlp", seeds=(0, 1), variants=[{"depth": 50}])
def deep_batch_norm_mlp(seed, depth):
    """BatchNorm without shortcuts explodes whatever the weights: by 1.21 per layer (Yang et al.), 4.2 over 50."""
    return judged(mlp(depth, "relu", norm=nn.BatchNorm1d, width=48), seed, width=48)


@label("vanishing", family="default cnn", seeds=(0, 1), variants=[{"depth": 18}])
def deep_plain_cnn_at_torch_default(seed, depth):
    """As the plain MLP: a factor of about 0.4 per convolution and no shortcut."""
    return kit.once(Pictures(depth), kit.images(seed), kit.cross_entropy)


@label("vanishing", family="cnn in eval", seeds=(0, 1), variants=[{"depth": 18}])
def untrained_batch_norm_in_eval_mode(seed, depth):
    """Fresh running statistics (mean 0, variance 1) make BatchNorm the identity: the plain stack vanishes."""
    return kit.once(Pictures(depth, norm=nn.BatchNorm2d).eval(), kit.images(seed), kit.cross_entropy)
