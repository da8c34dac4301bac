"""Sound networks on series, tables, sets and sequences, written out."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


class Basis(nn.Module):
    """A block of N-BEATS: a fully connected body with two heads, what it explains and what it foresees."""

    def __init__(self, past, ahead, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(past, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.back, self.front = nn.Linear(width, past), nn.Linear(width, ahead)

    def forward(self, x):
        z = self.body(x)
        return self.back(z), self.front(z)


@label("healthy", family="n-beats")
def residues_and_forecasts(seed):
    """N-BEATS of six blocks: each takes what it explains from its input and adds its forecast to the others'.
    Measured: output gradients 0.012 at blocks.0 and 0.01 at blocks.5 (of 6), parameters' 1.3 and 1.6; loss 2.64 ->
    0.14 in 30 steps of Adam."""

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Basis(24, 6, 48) for _ in range(6))
            self.last = nn.Linear(24, 6)

        def forward(self, x):
            total = torch.zeros(())
            for block in self.blocks:
                back, front = block(x)
                x, total = x - back, total + front
            return total + self.last(x)

    series = torch.randn(16, 30, generator=S.generator_of(seed)).cumsum(1) / 5
    return once(Forecaster(), (series[:, :24], series[:, 24:]), S.squares)


@label("healthy", family="dlrm")
def clicks_from_sparse_tables(seed):
    """DLRM: three tables of 500 rows with sparse gradients, a bottom network, products of pairs, a top network of
    four layers, Glorot's weights as in its code; SGD on dense and sparse parameters. Measured: output gradients
    0.00029 at bottom.0 and 0.00054 at bottom.3 (of 4), parameters' 0.06 and 0.072; loss 0.739 -> 0.714."""

    class Clicks(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(500, width, sparse=True, mode="mean") for _ in range(3))
            self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
            sizes = [width + 6, 48, 32, 16]
            pairs = itertools.pairwise(sizes)
            self.top = nn.Sequential(*[nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs], nn.Linear(16, 1))

        def forward(self, dense, sparse):
            low = self.bottom(dense)
            rows = torch.stack([low, *[table(sparse[:, k]) for k, table in enumerate(self.tables)]], dim=1)
            products = rows @ rows.mT
            first, second = torch.tril_indices(4, 4, -1)
            return self.top(torch.cat([low, products[:, first, second]], dim=1))[:, 0]

    generator = S.generator_of(seed)
    dense, clicked = torch.randn(64, 13, generator=generator), (torch.rand(64, generator=generator) < 0.3).float()
    sparse, model = torch.randint(500, (64, 3, 4), generator=generator), Clicks()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
        elif isinstance(module, nn.EmbeddingBag):
            nn.init.normal_(module.weight, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return fit(
        model,
        lambda _: F.binary_cross_entropy_with_logits(model(dense, sparse), clicked),
        steps=3,
        optimizer=optimizer,
    )


class Between(nn.Module):
    """The attention block of Set Transformer: a Post-LN block from one set to another."""

    def __init__(self, width=32):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.first, self.second, self.linear = nn.LayerNorm(width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x, y):
        x = self.first(x + self.attention(x, y, y, need_weights=False)[0])
        return self.second(x + F.relu(self.linear(x)))


@label("healthy", family="set transformer")
def sets_through_inducing_points(seed):
    """Set Transformer: three rounds through eight inducing points, pooled by one seed; the target is the largest
    element. Measured: output gradients 0.001 at down.0 and 0.001 at down.2 (of 3), parameters' 4.8 and 3.7; loss
    0.625 -> 0.0825 in 30 steps of Adam."""

    class Sets(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.entry, self.exit = nn.Linear(1, width), nn.Linear(width, 1)
            self.points = nn.Parameter(torch.randn(3, 8, width) * 0.3)
            self.down, self.up = (nn.ModuleList(Between() for _ in range(3)) for _ in range(2))
            self.seed, self.pool = nn.Parameter(torch.randn(1, width) * 0.3), Between()

        def forward(self, x):
            x = self.entry(x)
            for points, down, up in zip(self.points, self.down, self.up, strict=True):
                x = up(x, down(points.expand(len(x), -1, -1), x))
            return self.exit(self.pool(self.seed.expand(len(x), -1, -1), x))[:, 0, 0]

    x = torch.randn(12, 10, 1, generator=S.generator_of(seed))
    return once(Sets(), (x, x[..., 0].amax(1)), S.squares)


class Hop(nn.Module):
    """One hop: the state asks the facts by one table, reads them by another, and goes on through a matrix."""

    def __init__(self, width=24):
        super().__init__()
        self.asks, self.says, self.next = nn.Embedding(60, width), nn.Embedding(60, width), nn.Linear(width, width)
        self.times = nn.Parameter(torch.randn(8, width) * 0.1)
        nn.init.normal_(self.asks.weight, std=0.3)
        nn.init.normal_(self.says.weight, std=0.3)
        nn.init.orthogonal_(self.next.weight)

    def forward(self, state, facts):
        weights = torch.einsum("bd,bfd->bf", state, self.asks(facts).sum(2) + self.times).softmax(-1)
        return self.next(state) + torch.einsum("bf,bfd->bd", weights, self.says(facts).sum(2) + self.times)


@label("healthy", family="memory network")
def hops_over_a_memory(seed):
    """An end-to-end memory network of four hops with tables of their own and orthogonal matrices between. Measured:
    output gradients 0.012 at hops.0 and 0.0072 at hops.3 (of 4), parameters' 0.74 and 0.8; loss 4.16 -> 0.952 in 30
    steps of Adam."""

    class Memory(nn.Module):
        def __init__(self, width=24):
            super().__init__()
            self.asked, self.answer = nn.Embedding(60, width), nn.Linear(width, 60)
            self.hops = nn.ModuleList(Hop(width) for _ in range(4))
            nn.init.normal_(self.asked.weight, std=0.3)

        def forward(self, facts, question):
            state = self.asked(question).sum(1)
            for hop in self.hops:
                state = hop(state, facts)
            return self.answer(state)

    generator = S.generator_of(seed)
    facts, question = (
        torch.randint(60, (16, 8, 4), generator=generator),
        torch.randint(60, (16, 3), generator=generator),
    )
    return once(Memory(), (facts, question, facts[:, 2, 1]), S.cross_entropy)


class Chain(nn.Module):
    """Scores of a linear-chain CRF: the negative log-likelihood of the right tags."""

    def __init__(self, tags):
        super().__init__()
        self.moves = nn.Parameter(torch.randn(tags, tags) * 0.1)
        self.first = nn.Parameter(torch.zeros(tags))

    def forward(self, scores, right):
        alpha = self.first + scores[:, 0]
        for t in range(1, scores.shape[1]):
            alpha = (alpha[:, :, None] + self.moves).logsumexp(1) + scores[:, t]
        taken = scores.gather(2, right[..., None]).sum((1, 2)) + self.first[right[:, 0]]
        taken = taken + self.moves[right[:, :-1], right[:, 1:]].sum(1)
        return (alpha.logsumexp(1) - taken).mean() / scores.shape[1]


@label("healthy", family="crf tagger")
def tagger_with_a_chain_at_its_end(seed):
    """Three GRUs in a row, each read both ways and with a shortcut, under a conditional random field over four
    tags, 3 steps of Adam with clipping at 1. Measured: output gradients 0.0018 at read.0 and 0.0016 at read.2 (of
    3), parameters' 0.24 and 0.2; loss 1.55 -> 1.44."""

    class Tags(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.scores, self.chain = nn.Embedding(256, 32), nn.Linear(32, 4), Chain(4)
            self.read = nn.ModuleList(nn.GRU(32, 16, bidirectional=True, batch_first=True) for _ in range(3))

        def forward(self, ids, right):
            x = self.embed(ids)
            for layer in self.read:
                x = x + layer(x)[0]
            return self.chain(self.scores(x), right)

    model, (ids, _) = Tags(), S.text(seed, length=14)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return fit(model, lambda _: model(ids, ids % 4), steps=3, optimizer=optimizer, clip=1.0)


@label("healthy", family="reversible")
def reversible_halves(seed):
    """Reformer's layers: two halves that each add a function of the other, eight in a row with layer norms, over
    text. Measured: output gradients 0.0013 at 0 and 0.00097 at 10 (of 11), parameters' 0.078 and 1.1; loss 5.54 ->
    2.82 in 30 steps of Adam."""

    class Reversible(nn.Module):
        def __init__(self, width=24):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
            self.ffn = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

        def forward(self, x):
            a, b = x.chunk(2, dim=-1)
            z = self.norms[0](b)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            a = a + self.attention(z, z, z, attn_mask=mask, need_weights=False)[0]
            return torch.cat([a, b + self.ffn(self.norms[1](a))], dim=-1)

    blocks = [Reversible() for _ in range(8)]
    model = nn.Sequential(nn.Embedding(256, 48), *blocks, nn.LayerNorm(48), nn.Linear(48, 256))
    return once(model, S.text(seed, length=16), S.cross_entropy)


@label("healthy", family="quasi-recurrent")
def forgetting_by_convolutions(seed):
    """Four quasi-recurrent layers with shortcuts: gates from a convolution, an average that forgets channel by
    channel and nothing else through time. Measured: output gradients 0.002 at 0 and 0.0011 at 6 (of 7), parameters'
    0.091 and 0.89; loss 5.68 -> 3.67 in 30 steps of Adam."""

    class Forgets(nn.Module):
        def __init__(self, width=32):
            super().__init__()
            self.norm, self.gates = nn.LayerNorm(width), nn.Conv1d(width, 3 * width, 2)

        def forward(self, x):
            value, forget, out = self.gates(F.pad(self.norm(x).mT, (1, 0))).mT.chunk(3, dim=-1)
            state, states = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                keep = forget[:, t].sigmoid()
                state = keep * state + (1 - keep) * value[:, t].tanh()
                states.append(state)
            return x + out.sigmoid() * torch.stack(states, dim=1)

    model = nn.Sequential(nn.Embedding(256, 32), *[Forgets() for _ in range(4)], nn.LayerNorm(32), nn.Linear(32, 256))
    return once(model, S.text(seed, length=14), S.cross_entropy)
