"""Models that produce NaN or Inf, forward or backward, from the traps that bug reports are full of."""

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
BELOW = tuple(f"blocks.{k}" for k in range(4))
"""Where the gradient of a fault in block 3 goes."""


class Block(nn.Module):
    """A sound Pre-LN block."""

    def __init__(self, width=48):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Six blocks between an entry and an exit, one of which may be another."""

    def __init__(self, other=None, at=3, depth=6, width=48):
        super().__init__()
        self.entry, self.exit = nn.Linear(24, width), nn.Linear(width, 5)
        self.blocks = nn.ModuleList(other if other and k == at else Block(width) for k in range(depth))

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.exit(x)


@label("non-finite", family="entropy")
def entropy_of_certain_choices(seed):
    """p log p with p exactly 0: logits are 200 apart, exp underflows, 0 times -inf is NaN in the loss; outputs are
    finite. Measured: 40 of 40 parameters get NaN or Inf; every module's output is finite; loss nan -> nan in 30
    steps of Adam."""

    def loss(output, batch):
        chance = (output * 300).softmax(-1)
        return S.cross_entropy(output, batch) + 0.01 * (chance * chance.log()).sum(-1).mean()

    return once(Stack(), S.vectors(seed), loss)


@label("non-finite", family="distances")
def distance_to_itself(seed):
    """Pairwise distances by a square root, 0 on the diagonal: the slope there is Inf, and Inf times 0 is NaN.
    Measured: 40 of 40 parameters get NaN or Inf; every module's output is finite; loss 0.928 -> nan in 30 steps of
    Adam."""

    def loss(output, batch):
        gaps = (output[:, None] - output[None]).square().sum(-1).sqrt()
        same = batch[-1][:, None] == batch[-1][None]
        return torch.where(same, gaps, (2 - gaps).clamp(min=0)).mean()

    return once(Stack(), S.vectors(seed), loss)


class HalfFeedForward(Block):
    """A block whose feed-forward part runs in float16 with activations too large for it."""

    def forward(self, x):
        y = self.norm(x).half()
        y = F.linear(y, self.up.weight.half() * 60, self.up.bias.half()).relu().square()
        return x + F.linear(y, self.down.weight.half() * 60, self.down.bias.half()).float()


@label("non-finite", family="half precision", findings={"nonfinite_forward": S.first_under("blocks.3")})
def overflow_in_half_precision(seed):
    """One feed-forward part in float16 whose squares pass 65504, as reported of T5: Inf at block 3. Measured: 40 of
    40 parameters get NaN or Inf; NaN or Inf first comes out of blocks.3; loss nan -> nan in 30 steps of Adam."""
    return once(Stack(HalfFeedForward()), S.vectors(seed), S.cross_entropy)


class Standardised(Block):
    """A block that divides its stream by the deviation of each feature over the batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0)) / x.std(0)


@label("non-finite", family="batch of one", findings={"nonfinite_forward": S.first_under("blocks.2")})
def deviation_of_one_row(seed):
    """Features divided by their unbiased deviation over a batch of one row, which is 0/0: NaN at block 2. Measured:
    40 of 40 parameters get NaN or Inf; NaN or Inf first comes out of blocks.2; loss nan -> nan in 30 steps of Adam.
    """
    return once(Stack(Standardised(), at=2), S.vectors(seed, batch=1), S.cross_entropy)


class Attends(nn.Module):
    """Softmax attention under a mask of -inf."""

    def __init__(self, width=48):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, allowed):
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -math.inf)
        return x + self.out(scores.softmax(-1) @ v)


class Padded(nn.Module):
    """Five attention layers over padded sequences."""

    def __init__(self):
        super().__init__()
        self.embed, self.exit = nn.Embedding(256, 48), nn.Linear(48, 256)
        self.layers = nn.ModuleList(Attends() for _ in range(5))

    def forward(self, ids, real):
        x, allowed = self.embed(ids), real[:, None, :].expand(-1, ids.shape[1], -1)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.exit(x)


@label("non-finite", family="masked attention", findings={"nonfinite_forward": S.first_under("layers.0")})
def sequence_of_padding_alone(seed):
    """One sequence holds padding only: a softmax over nothing but -inf is NaN, from the first layer on. Measured: 33
    of 33 parameters get NaN or Inf; NaN or Inf first comes out of layers.0.out; loss nan -> nan in 30 steps of Adam.
    """
    ids, targets = S.text(seed, length=12)
    real = torch.arange(12) < torch.tensor([12, 7, 0, 9])[:, None]
    return once(Padded(), (ids, real, targets), S.cross_entropy)


class Variational(nn.Module):
    """A VAE whose log variance is not bounded."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(24, 48), Block(), Block(), nn.Linear(48, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 48), Block(), Block(), nn.Linear(48, 24))
        self.encoder[-1].bias.data[8:] = 200.0

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        sample = mean + torch.randn_like(mean) * log_variance.exp().sqrt()
        return F.mse_loss(self.decoder(sample), x)


@label("non-finite", family="vae", findings={"nonfinite_forward": S.first_under("decoder")})
def variance_beyond_exp(seed):
    """exp(200) is Inf in float32: the sample is, and the first layer of the decoder; the encoder's outputs are
    finite. Measured: 32 of 32 parameters get NaN or Inf; NaN or Inf first comes out of decoder.0; loss nan -> nan in
    30 steps of Adam."""
    return once(Variational(), (S.vectors(seed)[0], None), S.output_loss)


class Heads(nn.Module):
    """Six blocks and three heads; the last predicts the logarithm of a negative number."""

    def __init__(self):
        super().__init__()
        self.trunk = Stack()
        self.heads = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 3)) for name in "abc"}
        )
        self.size = Log()

    def forward(self, x):
        z = self.trunk(x)
        return [self.heads["a"](z), self.heads["b"](z), self.size(self.heads["c"](z))]


class Log(nn.Module):
    """The logarithm."""

    def forward(self, x):
        return x.log()


@label("non-finite", family="one head")
def one_head_takes_a_logarithm(seed):
    """Two heads are sound, the third takes the logarithm of linear outputs, of which half are below 0. Measured:
    output gradients 0.0011 at heads.a.0 and 0.006 at heads.a.2 (of 3), parameters' 0.15 and 0.4; 44 of 52 parameters
    get NaN or Inf; NaN or Inf first comes out of size; loss nan -> nan in 30 steps of Adam."""
    return once(Heads(), S.vectors(seed), lambda output, _: sum(part.square().mean() for part in output))


class Guarded(nn.Module):
    """A root of what torch.where takes when positive, and never of anything else, or so it seems."""

    def __init__(self, width=48):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        return x + torch.where(y > 0, y.sqrt(), torch.zeros_like(y))


@label("non-finite", family="guarded root", findings={"nonfinite_backward": S.under("entry", *BELOW)})
def root_behind_where(seed):
    """torch.where hides the root of negative numbers forward; backward, 0 is divided by that NaN. All outputs are
    finite. Measured: output gradients 0.0025 at blocks.3 and 0.0024 at blocks.5 (of 6), parameters' 0.46 and 0.43;
    22 of 36 parameters get NaN or Inf; every module's output is finite; loss 1.68 -> nan in 30 steps of Adam."""
    return once(Stack(Guarded()), S.vectors(seed), S.cross_entropy)


@label("non-finite", family="rotations", findings={"nonfinite_backward": S.some})
def angle_between_equal_rotations(seed):
    """A pose network whose last layer starts at the identity, as advised, and poses that are the identity: acos(1)
    is 0, its slope -Inf. Measured: 40 of 40 parameters get NaN or Inf; every module's output is finite; loss 0 ->
    nan in 30 steps of Adam."""
    model = Stack()
    model.exit = nn.Linear(48, 6)
    nn.init.zeros_(model.exit.weight)
    model.exit.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])

    def loss(output, _):
        first = F.normalize(output[:, :3], dim=-1)
        second = F.normalize(output[:, 3:] - (first * output[:, 3:]).sum(-1, keepdim=True) * first, dim=-1)
        third = torch.linalg.cross(first, second)
        trace = first[:, 0] + second[:, 1] + third[:, 2]
        return ((trace - 1) / 2).acos().mean()

    return once(model, S.vectors(seed), loss)


@label("non-finite", family="divergence")
def steps_that_diverge(seed):
    """Plain gradient descent at a rate of 1000 on a network without norms: the loss is NaN from the third step on.
    Measured: 16 of 16 parameters get NaN or Inf; NaN or Inf first comes out of 2.0; loss 0.92 -> nan."""
    model = nn.Sequential(
        nn.Linear(24, 48), *[nn.Sequential(nn.Linear(48, 48), nn.ReLU()) for _ in range(6)], nn.Linear(48, 1)
    )
    x, _ = S.vectors(seed)
    goal = x[:, :1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    return fit(model, lambda _: F.mse_loss(model(x), goal), steps=6, optimizer=optimizer)


@label("non-finite", family="missing values", findings={"nonfinite_forward": S.first_under("entry")})
def table_with_a_missing_value(seed):
    """One NaN among 32 x 24 inputs, a missing value read from a table: every output of that row is NaN. Measured: 40
    of 40 parameters get NaN or Inf; NaN or Inf first comes out of entry; loss nan -> nan in 30 steps of Adam."""
    x, y = S.vectors(seed)
    x[5, 7] = math.nan
    return once(Stack(), (x, y), S.cross_entropy)


@label("non-finite", family="ctc")
def targets_longer_than_sound(seed):
    """CTC with targets of 9 for sequences of 6 steps: no alignment exists, the loss is Inf, outputs are finite.
    Measured: 40 of 40 parameters get NaN or Inf; every module's output is finite; loss inf -> nan in 30 steps of
    Adam."""

    def loss(output, batch):
        chances = output.log_softmax(-1)[:, None].expand(-1, 2, -1)
        return F.ctc_loss(chances, torch.ones(2, 9, dtype=torch.long), torch.tensor([32, 6]), torch.tensor([9, 9]))

    return once(Stack(), S.vectors(seed), loss)


@label("non-finite", family="transformers t5")
def t5_in_half_precision(seed):
    """T5 in float16 whose second feed-forward weights are large, as training leaves them in its checkpoints: a
    product passes 65504 (its bug reports name that layer). Measured: 1 of 68 parameters get exactly 0; 67 of 68
    parameters get NaN or Inf; NaN or Inf first comes out of encoder.block.0.layer.1.DenseReluDense.wo; loss nan ->
    nan in 30 steps of Adam."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=256, d_model=48, d_kv=12, d_ff=96, num_layers=3, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    for block in model.encoder.block:
        block.layer[-1].DenseReluDense.wo.weight.data.mul_(1e6)
    ids = S.text(seed, sequences=3, length=12)[0]
    return once(model.half(), {"input_ids": ids, "labels": ids}, None)


@label("non-finite", family="transformers gpt2")
def language_model_whose_labels_are_all_ignored(seed):
    """GPT-2 where every label is -100: the mean over no token is 0/0, the loss NaN and every output finite.
    Measured: 52 of 52 parameters get exactly 0; NaN or Inf first comes out of the model; loss nan -> nan in 30 steps
    of Adam."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_layer=4, n_embd=48, n_head=4, n_positions=64))
    ids = S.text(seed, sequences=3, length=12)[0]
    return once(model, {"input_ids": ids, "labels": torch.full_like(ids, -100)}, None)
