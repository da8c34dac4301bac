"""Models that meet NaN or Inf, each by a way that the code states; sites are labelled where they are certain."""

from __future__ import annotations

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


class Unit(nn.Module):
    """A sound Pre-LN unit."""

    def __init__(self, width=40):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 80), nn.Linear(80, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Eight units, one of them replaced, between an entry and an exit."""

    def __init__(self, at=None, odd=None, outputs=5):
        super().__init__()
        self.entry, self.exit = nn.Linear(24, 40), nn.Linear(40, outputs)
        self.units = nn.ModuleList(odd if k == at else Unit() for k in range(8))

    def forward(self, x):
        x = self.entry(x)
        for unit in self.units:
            x = unit(x)
        return self.exit(x)


def upto(last):
    """Paths of the entry and of the units below, which a backward reaches after unit `last`."""
    return ("entry", *[f"units.{k}" for k in range(last + 1)])


class MeanOfChosen(nn.Module):
    """Adds to each row the mean over the rows of its group; a group that nobody joined has none."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        group = (torch.arange(len(x)) % 4)[:, None] == torch.arange(5)
        sums = group.float().mT @ self.linear(x)
        means = sums / group.sum(0)[:, None]
        return x + means.mean(0)


@label("non-finite", family="empty group", findings={"nonfinite_forward": S.first_under("units.3")})
def mean_over_an_empty_group(seed):
    """Unit 3 of 8 averages over five groups of which one is empty: 0/0. Measured: 48 of 48 parameters get NaN or
    Inf; NaN or Inf first comes out of units.3; loss nan -> nan in 30 steps of Adam."""
    return once(Stack(3, MeanOfChosen()), S.vectors(seed), S.cross_entropy)


class Direction(nn.Module):
    """Divides a sparse code by its length."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.constant_(self.linear.bias, -1.5)

    def forward(self, x):
        code = F.relu(self.linear(x))
        code = code * (torch.arange(len(code)) != 7)[:, None]
        return x + code / code.norm(dim=-1, keepdim=True)


@label("non-finite", family="zero length", findings={"nonfinite_forward": S.first_under("units.5")})
def code_divided_by_its_length(seed):
    """Unit 5 of 8 scales a ReLU code to length 1 without an epsilon; the code of row 7 is masked out: 0/0.
    Measured: 2 of 48 parameters get exactly 0; 46 of 48 parameters get NaN or Inf; NaN or Inf first comes out of
    units.5; loss nan -> nan in 30 steps of Adam."""
    return once(Stack(5, Direction()), S.vectors(seed), S.cross_entropy)


class Compressed(nn.Module):
    """The power law of a spectrogram: a third root of what is positive."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        y = self.linear(x)
        return x + (y * (y > 0)).pow(1 / 3)


@label("non-finite", family="power law", findings={"nonfinite_backward": S.under(*upto(5))})
def third_root_of_a_rectifier(seed):
    """Unit 4 of 8 takes the third root of y times (y > 0): half of it is exactly 0, where the slope is Inf, and Inf
    times the 0 of the comparison is NaN. All outputs are finite. Measured: output gradients 0.003 at units.4 and
    0.0027 at units.7 (of 8), parameters' 0.52 and 0.48; 28 of 48 parameters get NaN or Inf; every module's output
    is finite; loss 1.83 -> nan in 30 steps of Adam."""
    return once(Stack(4, Compressed()), S.vectors(seed), S.cross_entropy)


class Whitened(nn.Module):
    """Turns features to the axes of their covariance, which a penalty has already made the identity."""

    def __init__(self, width=40):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        y = self.linear(x)
        covariance = torch.eye(y.shape[1]) + y.mT @ y / len(y)
        _, axes = torch.linalg.eigh(covariance)
        return x + 0.1 * (x @ axes)


@label("non-finite", family="equal eigenvalues", findings={"nonfinite_backward": S.under(*upto(3))})
def axes_of_a_sphere(seed):
    """Unit 2 of 8 uses eigenvectors of a covariance whose eigenvalues are all 1: their derivative divides by the
    differences, which are 0. All outputs are finite. Measured: output gradients 0.0035 at units.2 and 0.0026 at
    units.7 (of 8), parameters' 0.54 and 0.48; 16 of 48 parameters get NaN or Inf; every module's output is finite;
    loss 1.76 -> nan in 30 steps of Adam."""
    return once(Stack(2, Whitened()), S.vectors(seed), S.cross_entropy)


class Restored(nn.Module):
    """A unit with batch norm in evaluation mode."""

    def __init__(self, width=40):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.linear(x)))


@label("non-finite", family="buffers", findings={"nonfinite_forward": S.first_under("units.6.norm")})
def variance_buffer_below_zero(seed):
    """A checkpoint averaged with momentum 1.1 left one running variance at -0.2; in evaluation mode batch norm
    takes its root: NaN in one channel of unit 6. Every parameter is finite. Measured: 50 of 50 parameters get NaN
    or Inf; NaN or Inf first comes out of units.6.norm; loss nan -> nan in 30 steps of Adam."""
    model = Stack(6, Restored()).eval()
    model.units[6].norm.running_var[3] = -0.2
    return once(model, S.vectors(seed), S.cross_entropy)


@label("non-finite", family="loss scale", findings={"nonfinite_backward": S.some})
def loss_scale_beyond_half_precision(seed):
    """A whole model in float16 with a loss scaled by 2^24: gradients pass 65504 on their way, outputs are finite.
    Measured: 52 of 52 parameters get NaN or Inf; every module's output is finite; loss 2.79e+07 -> nan in 30 steps
    of Adam."""
    model, (x, y) = Stack().half(), S.vectors(seed)
    return once(model, (x.half(), y), lambda output, batch: F.cross_entropy(output.float(), batch[-1]) * 2.0**24)


@label("non-finite", family="forbidden moves")
def chain_that_forbids_every_start(seed):
    """A conditional random field whose mask forbids every tag at the second step: its logsumexp is over -Inf alone,
    the loss -Inf and its gradient NaN. Measured: 52 of 52 parameters get NaN or Inf; every module's output is
    finite; loss -inf -> nan in 30 steps of Adam."""

    def loss(output, _):
        scores = output.view(8, 4, 5)
        allowed = torch.zeros(4, 5)
        allowed[1] = -math.inf
        alpha = scores[:, 0]
        for t in range(1, 4):
            alpha = alpha.logsumexp(1, keepdim=True) + scores[:, t] + allowed[t]
        return (alpha.logsumexp(1) - scores[..., 0].sum(1)).mean()

    return once(Stack(), S.vectors(seed), loss)


@label("non-finite", family="logits of chances", findings={"nonfinite_forward": S.first_under("units.7")})
def logit_of_a_certain_chance(seed):
    """Unit 7 of 8 mixes in log-odds: the logit of a sigmoid that float32 rounds to 1 is Inf. Measured: 48 of 48
    parameters get NaN or Inf; NaN or Inf first comes out of units.7; loss nan -> nan in 30 steps of Adam."""

    class Odds(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(40, 40)
            nn.init.constant_(self.linear.bias[3:4], 30.0)

        def forward(self, x):
            chance = self.linear(x).sigmoid()
            return x + 0.1 * torch.logit(chance)

    return once(Stack(7, Odds()), S.vectors(seed), S.cross_entropy)


class Inverted(torch.autograd.Function):
    """A square root written by hand whose backward divides by its output."""

    @staticmethod
    def forward(ctx, x):
        root = x.clamp_min(0).sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx, gradient):
        (root,) = ctx.saved_tensors
        return gradient / (2 * root)


@label("non-finite", family="own backward", findings={"nonfinite_backward": S.under(*upto(6))})
def backward_written_by_hand(seed):
    """Unit 5 of 8 has a root of its own whose backward divides by the root, which is 0 for half of its inputs.
    Measured: output gradients 0.0029 at units.5 and 0.0027 at units.7 (of 8), parameters' 0.57 and 0.48; 34 of 48
    parameters get NaN or Inf; every module's output is finite; loss 1.84 -> nan in 30 steps of Adam."""

    class Rooted(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(40, 40)

        def forward(self, x):
            return x + Inverted.apply(self.linear(x))

    return once(Stack(5, Rooted()), S.vectors(seed), S.cross_entropy)


@label("non-finite", family="transformers gptj", findings={"nonfinite_forward": S.first_under("transformer.h.2.attn")})
def infinite_attention_weights_from_a_checkpoint(seed):
    """GPT-J of 5 layers whose third value projection was saved in float16 and overflowed: Inf in its weights.
    Measured: 55 of 55 parameters get NaN or Inf; NaN or Inf first comes out of transformer.h.2.attn.v_proj; loss
    nan -> nan in 30 steps of Adam."""
    from transformers import GPTJConfig, GPTJForCausalLM

    config = GPTJConfig(
        vocab_size=256,
        n_embd=48,
        n_head=4,
        n_layer=5,
        rotary_dim=8,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = GPTJForCausalLM(config)
    weight = model.transformer.h[2].attn.v_proj.weight
    weight.data[5] = (weight.data[5] * 1e7).half().float()
    ids = S.text(seed, sequences=3, length=12)[0]
    return once(model, {"input_ids": ids, "labels": ids}, None)
