"""Sound models of sequences written by hand: recurrent, convolutional, linear attention, state spaces, pointers."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit


def waves(seed, length=64, batch=8):
    """Sums of two sines with noise, as [batch, length, 1]."""
    generator = S.generator_of(seed)
    time = torch.arange(length) / length
    rates = 2 + 6 * torch.rand(batch, 2, 1, generator=generator)
    return ((2 * math.pi * rates * time).sin().sum(1) + 0.05 * torch.randn(batch, length, generator=generator))[
        ..., None
    ]


class Tagger(nn.Module):
    """Bidirectional LSTM layers, one module each, that label every byte."""

    def __init__(self, width=32, layers=4):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.LSTM(width, width // 2, bidirectional=True, batch_first=True) for _ in range(layers)
        )
        for layer in self.layers:
            for name, parameter in layer.named_parameters():
                if "weight" in name:
                    nn.init.orthogonal_(parameter) if "hh" in name else nn.init.xavier_normal_(parameter, gain=1.6)
        self.head = nn.Linear(width, 256)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)[0] + x
        return self.head(x)


@label("healthy", family="bilstm")
def bidirectional_tagger(seed):
    """Four bidirectional LSTM layers with skips, orthogonal recurrence, for each byte its own class. Measured:
    output gradients 0.0013 at layers.0 and 0.0011 at layers.3 (of 4), parameters' 0.35 and 0.24; loss 6.07 -> 3.86
    in 30 steps of Adam."""
    ids = S.text(seed)[0]
    return once(Tagger(), (ids, ids), S.cross_entropy)


class Translator(nn.Module):
    """GRU layers on either side, with shortcuts, and additive attention between them."""

    def __init__(self, width=32, layers=4):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.encoder = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(layers))
        self.decoder = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(layers))
        self.key, self.query, self.energy = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, 256))

    def forward(self, source, target):
        seen, said, states = self.embed(source), self.embed(target), []
        for layer in self.encoder:
            out, state = layer(seen)
            seen, states = seen + out, [*states, state]
        for layer, state in zip(self.decoder, states, strict=True):
            said = said + layer(said, state)[0]
        scores = self.energy(torch.tanh(self.key(seen)[:, None] + self.query(said)[:, :, None]))[..., 0]
        return self.head(torch.cat([said, scores.softmax(-1) @ seen], dim=-1))


@label("healthy", family="gru seq2seq")
def translator_with_additive_attention(seed):
    """Bahdanau's model with four GRU layers a side on reversing bytes, after 20 steps of AdamW at 2e-3. Measured:
    output gradients 7e-05 at encoder.0 and 4.5e-05 at encoder.3 (of 4), parameters' 0.021 and 0.027; loss 3.36 ->
    2.4 in 30 steps of Adam."""
    ids = S.text(seed, length=16)[0]
    batch = (ids, ids, ids.flip(1))
    model = Translator()
    S.settle(model, batch, S.cross_entropy, steps=20, rate=2e-3)
    return once(model, batch, S.cross_entropy)


class GatedWave(nn.Module):
    """One layer of WaveNet: a dilated causal convolution with tanh and sigmoid, a residual and a skip."""

    def __init__(self, width, dilation, *, last):
        super().__init__()
        self.pad = dilation
        self.dilated = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.residual, self.skip = nn.Identity() if last else nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x):
        value, gate = self.dilated(F.pad(x, (self.pad, 0))).chunk(2, dim=1)
        z = value.tanh() * gate.sigmoid()
        return x + self.residual(z), self.skip(z)


class WaveNet(nn.Module):
    """Ten dilated layers whose skips are summed."""

    def __init__(self, width=24):
        super().__init__()
        self.entry = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(GatedWave(width, 2 ** (k % 5), last=k == 9) for k in range(10))
        self.exit = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 1, 1))

    def forward(self, x):
        x, total = self.entry(x.mT), 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.exit(total).mT


@label("healthy", family="wavenet")
def wavenet(seed):
    """Dilations 1 to 16, twice; the next sample of two sines; residuals and skips carry the gradient. Measured:
    output gradients 5.4e-05 at layers.0 and 1.6e-05 at layers.8 (of 10), parameters' 0.23 and 0.2; loss 1.18 -> 0.13
    in 30 steps of Adam."""
    x = waves(seed)
    return once(WaveNet(), (x[:, :-1], x[:, 1:]), S.squares)


class Causal(nn.Module):
    """A block of a temporal convolutional network: two weight-normed causal convolutions and a shortcut."""

    def __init__(self, width, dilation):
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.pad = 2 * dilation
        self.first = norm(nn.Conv1d(width, width, 3, dilation=dilation))
        self.second = norm(nn.Conv1d(width, width, 3, dilation=dilation))

    def forward(self, x):
        y = F.relu(self.first(F.pad(x, (self.pad, 0))))
        return F.relu(x + F.relu(self.second(F.pad(y, (self.pad, 0)))))


@label("healthy", family="tcn")
def temporal_convolutions(seed):
    """Six residual blocks of weight-normed convolutions (Bai et al.), dilations 1 to 32, in float64. Measured:
    output gradients 0.00026 at 0 and 0.0041 at 7 (of 8), parameters' 0.44 and 3.3; loss 1.04 -> 0.0716 in 30 steps
    of Adam."""
    model = nn.Sequential(nn.Conv1d(1, 24, 1), *[Causal(24, 2**k) for k in range(6)], nn.Conv1d(24, 1, 1)).double()
    x = waves(seed).double().mT
    return once(model, (x[..., :-1], x[..., 1:]), lambda output, batch: (output - batch[-1]).square().mean())


class LinearAttention(nn.Module):
    """Pre-norm attention with elu + 1 as its feature map and causal sums, and a feed-forward part."""

    def __init__(self, width=48):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        q, k, v = self.mix(self.norms[0](x)).chunk(3, dim=-1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        memory = torch.einsum("btk,btv->btkv", k, v).cumsum(1)
        attended = torch.einsum("btk,btkv->btv", q, memory) / (q * k.cumsum(1)).sum(-1, keepdim=True)
        x = x + self.out(attended)
        return x + self.ffn(self.norms[1](x))


class TokenMixing(nn.Module):
    """RWKV in small: a decaying weighted average over the past with a receptance gate, and its channel mixing."""

    def __init__(self, width=48):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.decay = nn.Parameter(torch.linspace(-3.0, 1.0, width))
        self.key, self.value, self.receptance = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = self.norms[0](x)
        y = 0.5 * (y + F.pad(y, (0, 0, 1, -1)))
        weight, value = self.key(y).clamp(max=20).exp(), self.value(y)
        keep, top, under = (-self.decay.exp()).exp(), 0.0, 0.0
        mixed = []
        for w, v in zip(weight.unbind(1), value.unbind(1), strict=True):
            top, under = keep * top + w * v, keep * under + w
            mixed.append(top / under)
        x = x + self.out(self.receptance(y).sigmoid() * torch.stack(mixed, 1))
        return x + self.narrow(self.wide(self.norms[1](x)).relu().square())


class StateSpace(nn.Module):
    """S4D in small: a diagonal recurrence as a long convolution, with GELU, a shortcut and a norm before."""

    def __init__(self, width=48, states=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.log_rate = nn.Parameter(torch.log(torch.arange(1, states + 1) / 2).repeat(width, 1))
        self.read = nn.Parameter(torch.randn(width, states) / states**0.5)
        self.log_step = nn.Parameter(torch.empty(width, 1).uniform_(math.log(1e-2), math.log(1e-1)))
        self.out = nn.Linear(width, 2 * width)

    def forward(self, x):
        length = x.shape[1]
        rate = self.log_rate.exp() * self.log_step.exp()
        kernel = torch.einsum(
            "cs,cst->ct", self.read * -torch.expm1(-rate), torch.exp(-rate[..., None] * torch.arange(length))
        )
        y = self.norm(x).mT
        y = torch.fft.irfft(torch.fft.rfft(y, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)[
            ..., :length
        ]
        return x + F.glu(self.out(F.gelu(y.mT)), dim=-1)


class Reader(nn.Module):
    """Embedding, blocks of one kind, a last norm, and the next byte."""

    def __init__(self, block, depth, width=48):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


BLOCKS = {"linear attention": LinearAttention, "token mixing": TokenMixing, "state space": StateSpace}


@label("healthy", family="reader of {block}s", variants=tuple({"block": name} for name in BLOCKS))
def reader(seed, block):
    """Eight pre-norm residual blocks with a mixer that is no softmax attention, next byte. Measured: linear
    attention: output gradients 0.00079 at blocks.0 and 0.00062 at blocks.7 (of 8), parameters' 0.55 and 0.5; loss
    5.64 -> 2.55 in 30 steps of Adam. token mixing: output gradients 0.0009 at blocks.0 and 0.0007 at blocks.7 (of
    8), parameters' 0.44 and 0.41; loss 5.59 -> 2.14 in 30 steps of Adam. state space: output gradients 0.00083 at
    blocks.0 and 0.00083 at blocks.7 (of 8), parameters' 0.09 and 0.097; loss 5.77 -> 3.92 in 30 steps of Adam."""
    return once(Reader(BLOCKS[block], depth=8), S.text(seed), S.cross_entropy)


class Pointer(nn.Module):
    """An encoder of torch with Post-LN and a pointer that sorts: scores between positions and ranks."""

    def __init__(self, width=32):
        super().__init__()
        self.entry = nn.Linear(1, width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.ranks = nn.Parameter(torch.randn(10, width) / width**0.5)

    def forward(self, x):
        return self.ranks @ self.encoder(self.entry(x)).mT


@label("healthy", family="pointer")
def pointer_that_sorts(seed):
    """Four Post-LN layers, few enough for it, point at the k-th smallest of ten numbers, after 10 steps. Measured:
    output gradients 0.00053 at encoder.layers.0 and 0.001 at encoder.layers.3 (of 4), parameters' 0.21 and 0.16;
    loss 2.19 -> 1.21 in 30 steps of Adam."""
    x = torch.rand(16, 10, 1, generator=S.generator_of(seed))
    batch = (x, x[..., 0].argsort(1))
    model = Pointer()
    S.settle(model, batch, S.cross_entropy, steps=10)
    return once(model, batch, S.cross_entropy)


class Writer(nn.Module):
    """A language model of LSTM layers with shortcuts, dropout, and one matrix for its embedding and its head."""

    def __init__(self, width=48, layers=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        for layer in self.layers:
            layer.bias_ih_l0.data[width : 2 * width] = 1.0

    def forward(self, ids):
        x = self.embed(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(layer(norm(x))[0], 0.1, self.training)
        return self.head(x)


@label("healthy", family="lstm language model")
def lstm_with_tied_weights(seed):
    """Four residual LSTM layers, forget biases of 1, tied weights, 3 steps of Adam with clipping at 0.25. Measured:
    output gradients 0.0043 at layers.0 and 0.0037 at layers.3 (of 4), parameters' 0.12 and 0.094; loss 6.71 -> 5.8.
    """
    model, batch = Writer(), S.text(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch), steps=3, optimizer=optimizer, clip=0.25)
