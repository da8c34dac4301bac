"""Models whose gradient is level along the stream and whose fault is beside it, and runs that say too little."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import keelscope as ks

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit
UPPER = tuple(f"blocks.{k}" for k in range(4, 8))


class Block(nn.Module):
    """A sound Pre-LN block with a weight on its branch."""

    def __init__(self, width=48, weight=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.weight = weight

    def forward(self, x):
        branch = self.down(F.relu(self.up(self.norm(x))))
        return x + (branch if self.weight is None else self.weight() * branch)


class Stack(nn.Module):
    """Blocks between an entry and an exit, with parts beside them; ``weight(k)`` makes the weight of block k."""

    def __init__(self, depth=8, width=48, weight=None):
        super().__init__()
        self.entry, self.exit = nn.Linear(24, width), nn.Linear(width, 5)
        self.blocks = nn.ModuleList(Block(width, weight(k) if weight else None) for k in range(depth))

    def features(self, x):
        """The stream at its end."""
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.exit(self.features(x))


class Gate(nn.Module):
    """A learned weight for a branch: a sigmoid or a clamp of one number for each channel."""

    def __init__(self, start, kind):
        super().__init__()
        self.gate, self.kind = nn.Parameter(torch.full((48,), start)), kind

    def forward(self):
        return self.gate.sigmoid() if self.kind == "sigmoid" else self.gate.clamp(0, 1)


@label("healthy", family="closed gates", healthy=False, findings={"gate_closed": S.under("blocks")})
def gates_that_start_closed(seed):
    """Every branch behind sigmoid(-7) = 0.0009: the stream is open, the branches get a thousandth and add nothing.
    Measured: output gradients 0.0023 at blocks.0 and 0.0023 at blocks.7 (of 8), parameters' 0.00042 and 0.00041;
    loss 1.57 -> 1.11 in 30 steps of Adam."""
    return once(Stack(weight=lambda _: Gate(-7.0, "sigmoid")), S.vectors(seed), S.cross_entropy)


@label("healthy", family="dead gates", healthy=False, findings={"gate_dead": S.under(*UPPER)})
def gates_below_their_clamp(seed):
    """The upper four branches of eight behind clamp(-0.5, 0, 1) = 0, where the clamp has no slope: these gates and
    branches get exactly 0; the lower four are half open. Measured: output gradients 0.0024 at blocks.0 and 0.0024 at
    blocks.7 (of 8), parameters' 0.23 and 0.22; 28 of 60 parameters get exactly 0; loss 1.58 -> 0.108 in 30 steps of
    Adam."""
    return once(Stack(weight=lambda k: Gate(0.5 if k < 4 else -0.5, "clamp")), S.vectors(seed), S.cross_entropy)


@label("healthy", family="stuck gates", healthy=False, findings={"saturated": S.under("blocks")})
def gates_stuck_open(seed):
    """Every branch behind sigmoid(16), whose slope is 1e-7: gates that were to learn stay at 1. Measured: output
    gradients 0.003 at blocks.0 and 0.0024 at blocks.7 (of 8), parameters' 0.55 and 0.36; loss 1.56 -> 0.00118 in 30
    steps of Adam."""
    return once(Stack(weight=lambda _: Gate(16.0, "sigmoid")), S.vectors(seed), S.cross_entropy)


@label("healthy", family="dead branch", healthy=False, findings={"zero_gradient": S.under("blocks.4")})
def one_branch_of_dead_units(seed):
    """The ReLUs of block 4 have a bias of -100: its norm and first layer get exactly 0, all else learns. Measured:
    output gradients 0.0028 at blocks.0 and 0.0024 at blocks.7 (of 8), parameters' 0.51 and 0.37; 5 of 52 parameters
    get exactly 0; loss 1.57 -> 0.00179 in 30 steps of Adam."""
    model = Stack()
    nn.init.constant_(model.blocks[4].up.bias, -100.0)
    return once(model, S.vectors(seed), S.cross_entropy)


class Aside(Stack):
    """A stack with a second head or a spare part that the loss does not see."""

    def __init__(self, how):
        super().__init__()
        self.aside, self.how = nn.Sequential(nn.Linear(48, 16), nn.GELU(), nn.Linear(16, 3)), how

    def forward(self, x):
        z = self.features(x)
        return self.exit(z), None if self.how == "unused" else self.aside(z)


@label(
    "healthy",
    family="aside {how}",
    healthy=False,
    variants=({"how": "forgotten"}, {"how": "unused"}, {"how": "zero weight"}),
    findings=lambda how: {
        {"forgotten": "disconnected", "unused": "never_called", "zero weight": "zero_gradient"}[how]: S.under("aside")
    },
)
def head_beside_the_loss(seed, how):
    """A second head whose output is left out of the loss, which never runs, or whose loss is multiplied by 0; the
    main head and all 8 blocks learn. Measured: forgotten: output gradients 0.003 at blocks.0 and 0.0024 at blocks.7
    (of 8), parameters' 0.55 and 0.36; 4 of 56 parameters get no gradient; loss 1.56 -> 0.00118 in 30 steps of Adam.
    unused: output gradients 0.003 at blocks.0 and 0.0024 at blocks.7 (of 8), parameters' 0.55 and 0.36; 4 of 56
    parameters get no gradient; loss 1.56 -> 0.00118 in 30 steps of Adam. zero weight: output gradients 0.003 at
    blocks.0 and 0.0024 at blocks.7 (of 8), parameters' 0.55 and 0.36; 4 of 56 parameters get exactly 0; loss 1.56 ->
    0.00118 in 30 steps of Adam."""

    def loss(output, batch):
        main = S.cross_entropy(output[0], batch)
        return main + 0.0 * output[1].square().mean() if how == "zero weight" else main

    return once(Aside(how), S.vectors(seed), loss)


@label("healthy", family="frozen", healthy=False, findings={"frozen": S.under("blocks.3")})
def one_block_frozen_by_mistake(seed):
    """requires_grad=False was left on block 3 of 8; the gradient passes through it, its parameters stay. Measured:
    output gradients 0.0028 at blocks.0 and 0.0022 at blocks.7 (of 8), parameters' 0.48 and 0.29; 6 of 52 parameters
    are frozen; loss 1.56 -> 1.36."""
    model = Stack()
    model.blocks[3].requires_grad_(requires_grad=False)
    batch = S.vectors(seed)
    learned = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch), steps=3, optimizer=learned)


class Scalar(nn.Module):
    """ReZero's weight."""

    def __init__(self, _):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self):
        return self.alpha


@label("healthy", family="rezero", healthy=False, findings={"zero_grad_stuck": S.under(*UPPER)})
def rezero_left_out_of_the_optimizer(seed):
    """The ReZero weights of blocks 4 to 7 are not among the optimizer's parameters: after 14 steps they are 0 and
    their branches without gradient, while the others opened. Measured: output gradients 0.0022 at blocks.0 and
    0.0022 at blocks.7 (of 8), parameters' 0.34 and 0.18; 24 of 60 parameters get exactly 0; loss 1.57 -> 1.33."""
    model, batch = Stack(weight=Scalar), S.vectors(seed)
    learned = [p for name, p in model.named_parameters() if not ("alpha" in name and name.startswith(UPPER))]
    return fit(
        model,
        lambda _: S.cross_entropy(model(batch[0]), batch),
        steps=14,
        optimizer=torch.optim.AdamW(learned, lr=1e-3),
    )


class Conditioned(Stack):
    """A stack told a class by an embedding whose table is read through .data."""

    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(7, 48)

    def forward(self, x, kind):
        z = self.entry(x) + self.kinds(kind).detach()
        for block in self.blocks:
            z = block(z)
        return self.exit(z)


@label("healthy", family="detached embedding", healthy=False, findings={"disconnected": S.under("kinds")})
def embedding_that_never_learns(seed):
    """The class embedding is detached before it is added; it runs and gets no gradient, everything else does.
    Measured: output gradients 0.0027 at blocks.0 and 0.0025 at blocks.7 (of 8), parameters' 0.6 and 0.5; 1 of 53
    parameters get no gradient; loss 1.77 -> 0.00748 in 30 steps of Adam."""
    x, y = S.vectors(seed)
    return once(Conditioned(), (x, torch.arange(32) % 7, y), S.cross_entropy)


@label("healthy", family="absorbed", healthy=False, findings={"residual_absorbed": S.under("blocks")})
def branches_lost_in_bfloat16(seed):
    """A stream of size 3000 in bfloat16, whose spacing there is 16, and branches below 1: 98 % of the entries of a
    sum are those of the stream. Measured: output gradients 7.9e-07 at blocks.0 and 7.9e-07 at blocks.7 (of 8),
    parameters' 0.00015 and 0.00015; loss 1.58 -> 0.00409 in 30 steps of Adam."""
    model, (x, y) = Stack(), S.vectors(seed)
    model.entry.weight.data.mul_(6000.0)
    model.exit.weight.data.div_(3000.0)
    return once(model.bfloat16(), (x.bfloat16(), y), S.cross_entropy)


@label("healthy", family="tiny loss", healthy=False, findings={"uniformly_small": lambda _: True})
def loss_in_the_wrong_unit(seed):
    """A loss multiplied by 1e-12, as a mean taken twice over a volume: level over depth, all of it below Adam's
    epsilon. Measured: output gradients 3e-15 at blocks.0 and 2.4e-15 at blocks.7 (of 8), parameters' 5.5e-13 and
    3.6e-13; loss 1.56e-12 -> 1.56e-12 in 30 steps of Adam."""
    return once(Stack(), S.vectors(seed), lambda output, batch: 1e-12 * S.cross_entropy(output, batch))


@label("not enough data", family="one layer {kind}", variants=({"kind": "linear"}, {"kind": "convolution"}))
def one_layer(seed, kind):
    """Logistic regression, or one convolution: there is no depth over which anything could shrink or grow. Measured:
    linear: loss 1.62 -> 1.44 in 30 steps of Adam. convolution: loss 1.47 -> 0.878 in 30 steps of Adam."""
    if kind == "linear":
        return once(nn.Linear(24, 5), S.vectors(seed), S.cross_entropy)
    pictures, _ = S.images(seed)
    return once(nn.Conv2d(3, 3, 3, padding=1), (pictures, pictures), S.squares)


@label("not enough data", family="forward only", findings={"no_backward": lambda _: True})
def steps_without_a_backward(seed):
    """An evaluation loop that was watched by mistake: forwards with gradients enabled, no backward. Measured: 52 of
    52 parameters get no gradient; loss 1.56."""
    model, batch = Stack(), S.vectors(seed)
    with ks.watch(model, probes=S.PROBES) as session:
        for _ in range(2):
            session.log(loss=S.cross_entropy(model(batch[0]), batch).detach())
            session.step()
    return session.run
