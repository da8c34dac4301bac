"""Sound models whose way of training is the point: pairs, triplets, teachers, several tasks, exits, adapters."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


class Unit(nn.Module):
    """A residual unit with a norm first."""

    def __init__(self, width=40):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Body(nn.Module):
    """An entry and residual units."""

    def __init__(self, depth=6, width=40, inputs=24, outputs=5):
        super().__init__()
        self.entry, self.exit = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.units = nn.ModuleList(Unit(width) for _ in range(depth))

    def features(self, x):
        """The stream at its end."""
        x = self.entry(x)
        for unit in self.units:
            x = unit(x)
        return x

    def forward(self, x):
        return self.exit(self.features(x))


@label("healthy", family="triplets")
def nearer_to_its_like_than_to_others(seed):
    """One network called on anchor, positive and negative, a margin of 1 on unit vectors, which no triplet
    satisfies yet; 3 steps of Adam. Measured: output gradients 0.0019 at units.0 and 0.0014 at units.5 (of 6),
    parameters' 0.24 and 0.17; loss 0.0967 -> 0.0126."""
    model, (x, _) = Body(outputs=8), S.vectors(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(_):
        anchor, positive, negative = (
            F.normalize(model(part), dim=-1) for part in (x, x + 0.3 * x.roll(1, 1), x.roll(1, 0))
        )
        return F.triplet_margin_loss(anchor, positive, negative, margin=1.0)

    return fit(model, loss, steps=3, optimizer=optimizer)


@label("healthy", family="simclr")
def two_views_against_a_batch(seed):
    """SimCLR: two noisy views in one batch of 64, a projector of its own, temperature 0.5, in bfloat16 autocast.
    Measured: output gradients 0.0019 at 0.units.0 and 0.0015 at 0.units.5 (of 6), parameters' 0.36 and 0.32; loss
    3.35 -> 3."""
    model, (x, _) = Body(outputs=40), S.vectors(seed)
    projector = nn.Sequential(nn.ReLU(), nn.Linear(40, 16))
    whole = nn.Sequential(model, projector)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)

    def loss(k):
        noise = torch.randn(64, 24, generator=S.generator_of(seed + k))
        with S.autocast(torch.bfloat16):
            z = F.normalize(whole(torch.cat([x, x]) + 0.3 * noise).float(), dim=-1)
        likeness = (z @ z.mT / 0.5).masked_fill(torch.eye(64, dtype=torch.bool), -1e9)
        return F.cross_entropy(likeness, (torch.arange(64) + 32) % 64)

    return fit(whole, loss, steps=3, optimizer=optimizer)


@label("healthy", family="student")
def student_of_a_frozen_teacher(seed):
    """A student of 8 units learns the soft scores of a larger teacher, which is outside of the watched model and
    has no gradient; a share of 0.3 on the labels. Measured: output gradients 0.0017 at units.0 and 0.0012 at
    units.7 (of 8), parameters' 0.37 and 0.26; loss 0.66 -> 0.343 in 30 steps of Adam."""
    teacher, model, (x, y) = Body(depth=3, width=64).eval(), Body(depth=8), S.vectors(seed)
    with torch.no_grad():
        taught = (teacher(x) / 2).softmax(-1)

    def loss(output, _):
        return 0.7 * 4 * F.kl_div((output / 2).log_softmax(-1), taught, reduction="batchmean") + 0.3 * F.cross_entropy(
            output, y
        )

    return once(model, (x, y), loss)


@label("healthy", family="uncertain tasks")
def tasks_weighted_by_their_uncertainty(seed):
    """Three tasks on one body with learned log variances that weigh their losses (Kendall et al.), 3 steps of Adam,
    two micro-batches each. Measured: output gradients 0.00087 at body.units.0 and 0.00079 at body.units.5 (of 6),
    parameters' 0.23 and 0.22; loss 1.75 -> 1.62."""

    class Tasks(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Body(outputs=40)
            self.heads = nn.ModuleList(nn.Linear(40, size) for size in (5, 1, 3))
            self.doubts = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            z = F.silu(self.body(x))
            return [head(z) for head in self.heads]

    model, (x, y) = Tasks(), S.vectors(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(_):
        a, b, c = model(x)
        losses = torch.stack(
            [F.cross_entropy(a, y), (b[:, 0] - x.sum(1) / 5).square().mean(), F.cross_entropy(c, y % 3)]
        )
        return ((-model.doubts).exp() * losses + model.doubts).sum()

    return fit(model, loss, steps=3, optimizer=optimizer, accumulate=2)


@label("healthy", family="early exits")
def exits_after_every_second_unit(seed):
    """An exit after units 2, 4, 6 and 8 with weights 1 to 4, as for anytime prediction. Measured: output gradients
    0.0023 at units.0 and 0.0012 at units.7 (of 8), parameters' 0.35 and 0.19; loss 1.66 -> 0.205 in 30 steps of
    Adam."""

    class Exits(nn.Module):
        def __init__(self):
            super().__init__()
            self.entry = nn.Linear(24, 40)
            self.units = nn.ModuleList(Unit() for _ in range(8))
            self.exits = nn.ModuleList(nn.Sequential(nn.LayerNorm(40), nn.Linear(40, 5)) for _ in range(4))

        def forward(self, x):
            x, scores = self.entry(x), []
            for k, unit in enumerate(self.units):
                x = unit(x)
                if k % 2:
                    scores.append(self.exits[k // 2](x))
            return scores

    def loss(output, batch):
        return sum(k * F.cross_entropy(scores, batch[-1]) for k, scores in enumerate(output, start=1)) / 10

    return once(Exits(), S.vectors(seed), loss)


class Reverse(torch.autograd.Function):
    """Nothing forward, the negated gradient backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


@label("healthy", family="domains")
def reversed_gradient_to_hide_a_domain(seed):
    """Domain-adversarial training: a head for the domain behind a reversed gradient of full size, a head for the
    class, one body; 3 steps of SGD with momentum. Measured: output gradients 0.002 at body.units.0 and 0.0017 at
    body.units.5 (of 6), parameters' 0.26 and 0.26; loss 2.39 -> 2.33."""

    class Domains(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.kind = Body(outputs=40), nn.Linear(40, 5)
            self.domain = nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 2))

        def forward(self, x):
            z = self.body(x)
            return self.kind(z), self.domain(Reverse.apply(z))

    model, (x, y) = Domains(), S.vectors(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def loss(_):
        kind, domain = model(x)
        return F.cross_entropy(kind, y) + F.cross_entropy(domain, torch.arange(32) % 2)

    return fit(model, loss, steps=3, optimizer=optimizer)


@label("healthy", family="mixup")
def mixed_pairs_with_smooth_labels(seed):
    """Mixup with a fixed share of 0.7 and labels smoothed by 0.1, RMSprop, and an averaged copy kept beside it that
    gets no gradient. Measured: output gradients 0.0025 at units.0 and 0.0011 at units.9 (of 10), parameters' 0.41
    and 0.2; loss 1.66 -> 1.06."""
    model, (x, y) = Body(depth=10), S.vectors(seed)
    average = copy.deepcopy(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-4)

    def loss(_):
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        output = model(0.7 * x + 0.3 * x.flip(0))
        return sum(
            share * F.cross_entropy(output, goal, label_smoothing=0.1) for share, goal in ((0.7, y), (0.3, y.flip(0)))
        )

    return fit(model, loss, steps=4, optimizer=optimizer)


class Adapted(nn.Module):
    """A frozen unit followed by a bottleneck that learns, with a small and not a zero start."""

    def __init__(self):
        super().__init__()
        self.unit = Unit().requires_grad_(requires_grad=False)
        self.adapter = nn.Sequential(nn.Linear(40, 8), nn.GELU(), nn.Linear(8, 40))

    def forward(self, x):
        x = self.unit(x)
        return x + self.adapter(x)


@label("healthy", family="adapters")
def bottlenecks_in_a_frozen_body(seed):
    """Houlsby's adapters behind eight frozen units, entry frozen, head learned: freezing is meant and the gradient
    crosses every unit. Measured: output gradients 0.0033 at 1 and 0.013 at 9 (of 10), parameters' 0.28 and 1.5; 50
    of 84 parameters are frozen; loss 1.76 -> 0.924 in 30 steps of Adam."""
    model = nn.Sequential(
        nn.Linear(24, 40).requires_grad_(requires_grad=False), *[Adapted() for _ in range(8)], nn.Linear(40, 5)
    )
    return once(model, S.vectors(seed), S.cross_entropy)


@label("healthy", family="bias tuning")
def biases_alone_are_learned(seed):
    """BitFit: all matrices are frozen, biases and the head learn; 3 steps of AdamW. Measured: output gradients
    0.0033 at units.0 and 0.0025 at units.7 (of 8), parameters' 0.14 and 0.1; 25 of 52 parameters are frozen; loss
    1.65 -> 1.62."""
    model, batch = Body(depth=8), S.vectors(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("exit"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch), steps=3, optimizer=optimizer)


@label("healthy", family="penalty")
def penalty_on_the_input_gradient(seed):
    """A critic with Wasserstein's gradient penalty: the loss holds a gradient, backward goes twice through each
    layer; layers of He with leaky ReLU. Measured: parameters' gradients 2.9 at 0, 2 at 1 and 5.6 at 5 (of 7); loss
    5.57 -> 5.5."""
    layers = [nn.Sequential(nn.Linear(48, 48), nn.LeakyReLU(0.2)) for _ in range(5)]
    for layer in layers:
        nn.init.kaiming_normal_(layer[0].weight, a=0.2)
    model = nn.Sequential(nn.Linear(24, 48), *layers, nn.Linear(48, 1, bias=False))
    x, _ = S.vectors(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.0, 0.9))

    def loss(_):
        between = (0.5 * x + 0.5 * x.flip(0)).requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return model(x.sin()).mean() - model(x).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    return fit(model, loss, steps=2, optimizer=optimizer)


@label("healthy", family="sharpness")
def two_backwards_for_a_flat_minimum(seed):
    """Sharpness-aware minimisation: a first backward only finds where the loss is higher 0.05 away, the second one,
    there, makes the step, which starts from where the first began. Measured: output gradients 0.0031 at units.0 and
    0.0025 at units.5 (of 6), parameters' 0.35 and 0.31; loss 1.75 -> 1.56."""
    model, batch, moved = Body(depth=6), S.vectors(seed), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    @torch.no_grad()
    def back(*_):
        for parameter, move in moved:
            parameter.sub_(move)
        moved.clear()

    optimizer.register_step_pre_hook(back)

    def loss(_):
        S.cross_entropy(model(batch[0]), batch).backward()
        with torch.no_grad():
            length = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
            for parameter in model.parameters():
                moved.append((parameter, 0.05 * parameter.grad / length))
                parameter.add_(moved[-1][1])
        optimizer.zero_grad()
        return S.cross_entropy(model(batch[0]), batch)

    return fit(model, loss, steps=3, optimizer=optimizer)
