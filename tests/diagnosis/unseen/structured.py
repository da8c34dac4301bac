"""Sound models of other shapes: graphs, sets, pairs, experts, agents, recommenders."""

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


class Message(nn.Module):
    """Message passing: mean over neighbours, a GELU, a shortcut, a norm before."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.own, self.other = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, neighbours):
        y = self.norm(x)
        return x + F.gelu(self.own(y) + self.other(neighbours @ y))


class GraphNet(nn.Module):
    """Eight rounds of messages, then a class for each node."""

    def __init__(self, width=32, rounds=8):
        super().__init__()
        self.entry, self.exit = nn.Linear(8, width), nn.Linear(width, 3)
        self.rounds = nn.ModuleList(Message(width) for _ in range(rounds))

    def forward(self, x, neighbours):
        x = self.entry(x)
        for message in self.rounds:
            x = message(x, neighbours)
        return self.exit(x)


def graph(seed, nodes=60):
    """Node features, a row-normalised adjacency, and a class from the features."""
    generator = S.generator_of(seed)
    x = torch.randn(nodes, 8, generator=generator)
    links = (torch.rand(nodes, nodes, generator=generator) < 0.08).float()
    links = ((links + links.mT + torch.eye(nodes)) > 0).float()
    return x, links / links.sum(1, keepdim=True), x[:, :3].argmax(1)


@label("healthy", family="graph")
def graph_network(seed):
    """Residual pre-norm message passing on a random graph, classes of nodes; no over-smoothing by the shortcut.
    Measured: output gradients 0.0035 at rounds.0 and 0.0017 at rounds.7 (of 8), parameters' 1.4 and 0.74; loss 1.68
    -> 0.123 in 30 steps of Adam."""
    return once(GraphNet(), graph(seed), S.cross_entropy)


class Tower(nn.Module):
    """A residual chain that ends on the unit sphere."""

    def __init__(self, inputs=24, width=48, depth=4):
        super().__init__()
        self.entry, self.exit = nn.Linear(inputs, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = x + block(x)
        return F.normalize(self.exit(x), dim=-1)


class Contrast(nn.Module):
    """One tower for both views of SimCLR, or for anchor, friend and stranger."""

    def __init__(self, loss):
        super().__init__()
        self.tower, self.loss = Tower(), loss

    def forward(self, *views):
        return self.loss(*[self.tower(view) for view in views])


def views_agree(a, b):
    """NT-Xent at a temperature of 0.1."""
    z = torch.cat([a, b])
    scores = (z @ z.mT / 0.1).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(len(z)).roll(len(a)))


@label("healthy", family="pairs {kind}", variants=({"kind": "simclr"}, {"kind": "triplet"}))
def shared_tower(seed, kind):
    """One tower called two or three times a step, its gradient the sum over the calls. Measured: simclr: output
    gradients 0.018 at tower.blocks.0 and 0.014 at tower.blocks.3 (of 4), parameters' 2.7 and 2.1; loss 2.37 ->
    0.0582 in 30 steps of Adam. triplet: output gradients 0.0027 at tower.blocks.0 and 0.0022 at tower.blocks.3 (of
    4), parameters' 0.45 and 0.37; loss 0.47 -> 0 in 30 steps of Adam."""
    x, _ = S.vectors(seed)
    noisy = x + torch.randn(x.shape, generator=S.generator_of(seed))
    loss = views_agree if kind == "simclr" else nn.TripletMarginLoss(1.0)
    batch = (x, noisy, None) if kind == "simclr" else (x, noisy, x.roll(1, 0), None)
    return once(Contrast(loss), batch, S.output_loss)


class Predicts(nn.Module):
    """BYOL: a learner with a predictor, and a frozen slow copy of it as the target."""

    def __init__(self):
        super().__init__()
        self.learner, self.target = Tower(), Tower().requires_grad_(requires_grad=False)
        self.target.load_state_dict(self.learner.state_dict())
        self.predictor = nn.Sequential(nn.Linear(16, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 16))

    def forward(self, a, b):
        with torch.no_grad():
            goal = self.target(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.learner(a)), goal).mean()


@label("healthy", family="byol")
def learner_and_slow_target(seed):
    """The target is frozen and runs without gradient on purpose; the learner gets all of it. Measured: output
    gradients 0.0027 at learner.blocks.0 and 0.0022 at learner.blocks.3 (of 4), parameters' 0.49 and 0.44; 28 of 62
    parameters are frozen; loss 2.01 -> 0.267 in 30 steps of Adam."""
    x, _ = S.vectors(seed)
    return once(Predicts(), (x, x + 0.1 * torch.randn_like(x), None), S.output_loss)


class Experts(nn.Module):
    """One expert a token by its router, weighted by its chance, behind a norm and a shortcut."""

    def __init__(self, width=32, experts=6):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(experts)
        )

    def forward(self, x):
        y = self.norm(x)
        chance, chosen = self.router(y).softmax(-1).max(-1)
        out = torch.zeros_like(y)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(y[rows]) * chance[rows, None])
        return x + out


class Switch(nn.Module):
    """Six layers of experts between a stem and a head."""

    def __init__(self, width=32):
        super().__init__()
        self.stem, self.head = nn.Linear(24, width), nn.Linear(width, 5)
        self.layers = nn.ModuleList(Experts(width) for _ in range(6))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@label("healthy", family="switch")
def experts_that_nobody_chose(seed):
    """Switch routing of 8 rows over 6 experts a layer: by design some experts do not run in a step. Measured: output
    gradients 0.013 at layers.0 and 0.012 at layers.5 (of 6), parameters' 0.25 and 0.24; 36 of 166 parameters get no
    gradient; loss 1.58 -> 0.0072 in 30 steps of Adam."""
    return once(Switch(), S.vectors(seed, batch=8), S.cross_entropy)


class Agent(nn.Module):
    """A trunk with a policy and a value, orthogonal with the usual gains."""

    def __init__(self, width=64):
        super().__init__()
        sizes = (24, width, width, width, width)
        self.trunk = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)])
        self.policy, self.value = nn.Linear(width, 4), nn.Linear(width, 1)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, 2**0.5)
                nn.init.zeros_(module.bias)
        self.policy.weight.data.mul_(0.01 / 2**0.5)

    def forward(self, seen):
        z = self.trunk(seen)
        return self.policy(z), self.value(z)[:, 0]


@label("healthy", family="agent")
def policy_and_value(seed):
    """PPO's clipped surrogate, value and entropy on made-up advantages, 4 steps with Adam at 3e-4, clipping at 0.5.
    Measured: output gradients 0.0017 at trunk.0 and 0.0016 at trunk.3 (of 4), parameters' 0.23 and 0.21; loss 0.758
    -> 0.655."""
    model, (seen, _) = Agent(), S.vectors(seed, batch=128)
    generator = S.generator_of(seed)
    act, gain = torch.randint(4, (128,), generator=generator), torch.randn(128, generator=generator)
    with torch.no_grad():
        before = model(seen)[0].log_softmax(-1)[torch.arange(128), act]

    def loss_of(_):
        logits, value = model(seen)
        chances = logits.log_softmax(-1)
        ratio = (chances[torch.arange(128), act] - before).exp()
        surrogate = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return 0.5 * F.mse_loss(value, gain) - surrogate + 0.01 * (chances.exp() * chances).sum(-1).mean()

    return fit(model, loss_of, steps=4, optimizer=torch.optim.Adam(model.parameters(), lr=3e-4), clip=0.5)


class Points(nn.Module):
    """PointNet: four shared layers with batch norm for each point, a maximum, and a head."""

    def __init__(self, width=48):
        super().__init__()
        self.shared = nn.Sequential(
            *[nn.Sequential(nn.Conv1d(a, width, 1), nn.BatchNorm1d(width), nn.ReLU()) for a in (3, width, width, width)]
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, x):
        return self.head(self.shared(x).amax(-1))


@label("healthy", family="points")
def points_with_a_maximum(seed):
    """PointNet on 8 clouds of 40 points: the maximum sends a gradient to few points, and to every layer. Measured:
    output gradients 0.0023 at shared.0 and 0.00072 at shared.3 (of 4), parameters' 0.99 and 1.8; loss 1.58 -> 0.222
    in 30 steps of Adam."""
    x = torch.randn(8, 3, 40, generator=S.generator_of(seed)) * torch.arange(1, 9)[:, None, None] / 4
    return once(Points(), (x, torch.arange(8) // 2), S.cross_entropy)


class Recommender(nn.Module):
    """Embeddings of two ids and a table beside them through a residual network, with sparse rows in use."""

    def __init__(self, width=32):
        super().__init__()
        self.user, self.item, self.entry = nn.Embedding(500, 16), nn.Embedding(500, 16), nn.Linear(24 + 32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width)) for _ in range(5)
        )
        self.exit = nn.Linear(width, 1)

    def forward(self, user, item, table):
        x = self.entry(torch.cat([self.user(user), self.item(item), table], dim=-1))
        for block in self.blocks:
            x = x + block(x)
        return self.exit(x)[:, 0]


@label("healthy", family="recommender")
def recommender_of_rare_rows(seed):
    """32 of 500 users in a batch: most rows of the tables have a gradient of 0 by design; clicks by logistic loss.
    Measured: output gradients 0.0016 at blocks.0 and 0.0014 at blocks.4 (of 5), parameters' 0.38 and 0.42; loss
    0.718 -> 0.008 in 30 steps of Adam."""
    x, y = S.vectors(seed)
    ids = torch.randint(500, (2, 32), generator=S.generator_of(seed))
    return once(
        Recommender(),
        (ids[0], ids[1], x, (y > 2).float()),
        lambda output, batch: F.binary_cross_entropy_with_logits(output, batch[-1]),
    )
