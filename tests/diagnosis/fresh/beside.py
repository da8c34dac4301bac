"""Models whose stream is level and whose fault lies beside it, and runs that hold too little to judge."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import keelscope as ks

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


class Block(nn.Module):
    """A Pre-LN transformer block with projections of its own for query, key and value."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, x, gain=1.0):
        """Attention over all positions, with logits times a gain."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        weights = (gain * q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Reader(nn.Module):
    """An embedding, eight blocks, some of them replaced, and a head."""

    def __init__(self, depth=8, width=32, odd=None):
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList((odd or {}).get(k, Block)(width) for k in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def start(self, ids):
        """Tokens and positions."""
        return self.embed(ids) + self.positions(torch.arange(ids.shape[1]))

    def forward(self, ids):
        x = self.start(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Sharp(Block):
    """Attention whose logits are a million times too large."""

    def attend(self, x, gain=1e6):
        """Attention to one position."""
        return super().attend(x, gain)


@label("healthy", family="sharp attention", healthy=False, findings={"zero_gradient": S.under("blocks.2")})
def attention_that_looks_at_one_place(seed):
    """Block 2 of 8 multiplies its logits by a million: its softmax is exactly 0 and 1, query and key get exactly 0;
    value, feed-forward and all other blocks learn. Measured: output gradients 0.0019 at blocks.0 and 0.0017 at
    blocks.7 (of 8), parameters' 0.5 and 0.43; 4 of 134 parameters get exactly 0; loss 5.62 -> 2.63 in 30 steps of
    Adam."""
    return once(Reader(odd={2: Sharp}), S.text(seed, length=10), S.cross_entropy)


class Spared(Block):
    """A block with an adapter that is computed and never added."""

    def __init__(self, width):
        super().__init__(width)
        self.adapter = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x):
        x = super().forward(x)
        self.adapter(x)
        return x


@label("healthy", family="lost adapter", healthy=False, findings={"disconnected": S.under("blocks.3.adapter")})
def adapter_computed_and_not_added(seed):
    """The adapter of block 3 runs and its result is thrown away: its four parameters get no gradient, all else
    does. Measured: output gradients 0.0018 at blocks.0 and 0.0016 at blocks.7 (of 8), parameters' 0.44 and 0.38; 4
    of 138 parameters get no gradient; loss 5.8 -> 2.75 in 30 steps of Adam."""
    return once(Reader(odd={3: Spared}), S.text(seed, length=10), S.cross_entropy)


class Zipped(Reader):
    """A loop over blocks and rates that ends with the shorter list."""

    def forward(self, ids):
        x = self.start(ids)
        for block, rate in zip(self.blocks, (0.0, 0.0, 0.1, 0.1, 0.2), strict=False):
            x = F.dropout(block(x), rate, self.training)
        return self.head(self.norm(x))


@label(
    "healthy",
    family="short loop",
    healthy=False,
    findings={"never_called": S.under("blocks.5", "blocks.6", "blocks.7")},
)
def loop_that_ends_with_the_shorter_list(seed):
    """Eight blocks are zipped with five dropout rates: the last three never run. The five that run are sound.
    Measured: output gradients 0.002 at blocks.0 and 0.0017 at blocks.4 (of 8), parameters' 0.48 and 0.41; 48 of 134
    parameters get no gradient; loss 5.52 -> 3.58 in 30 steps of Adam."""
    return once(Zipped(), S.text(seed, length=10), S.cross_entropy)


class Copied(Reader):
    """Positions that are copied out of their table."""

    def start(self, ids):
        """Tokens and numbers that were positions."""
        return self.embed(ids) + torch.tensor(self.positions(torch.arange(ids.shape[1])).tolist())


@label("healthy", family="copied positions", healthy=False, findings={"disconnected": S.under("positions")})
def positions_copied_as_numbers(seed):
    """The positional table is read through a list and stays as it was made; it runs, and everything else learns.
    Measured: output gradients 0.0019 at blocks.0 and 0.0017 at blocks.7 (of 8), parameters' 0.52 and 0.46; 1 of 134
    parameters get no gradient; loss 5.61 -> 2.66 in 30 steps of Adam."""
    return once(Copied(), S.text(seed, length=10), S.cross_entropy)


@label("healthy", family="frozen attention", healthy=False, findings={"frozen": S.under("blocks.4")})
def one_attention_left_frozen(seed):
    """A loop that unfroze block after block forgot the value and output matrices of block 4; 3 steps of AdamW on
    the rest. Measured: output gradients 0.0018 at blocks.0 and 0.0017 at blocks.7 (of 8), parameters' 0.44 and
    0.42; 4 of 134 parameters are frozen; loss 5.61 -> 5.18."""
    model, batch = Reader(), S.text(seed, length=10)
    model.blocks[4].value.requires_grad_(requires_grad=False)
    model.blocks[4].out.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch), steps=3, optimizer=optimizer)


class Below(Block):
    """A feed-forward whose hidden units are all off."""

    def forward(self, x):
        x = x + self.attend(self.first(x))
        return x + self.down(F.relu6(self.up(self.second(x)) - 200.0))


@label("healthy", family="units off", healthy=False, findings={"zero_gradient": S.under("blocks.1", "blocks.6")})
def two_feed_forwards_that_are_off(seed):
    """In blocks 1 and 6 of 8 a constant of 200 taken from every hidden unit leaves ReLU6 at 0: norm and first
    matrix of these feed-forwards get exactly 0. Measured: output gradients 0.0019 at blocks.0 and 0.0018 at
    blocks.7 (of 8), parameters' 0.51 and 0.44; 10 of 134 parameters get exactly 0; loss 5.59 -> 2.82 in 30 steps of
    Adam."""
    return once(Reader(odd={1: Below, 6: Below}), S.text(seed, length=10), S.cross_entropy)


@label("not enough data", family="word vectors", healthy=True)
def skip_gram_of_two_tables(seed):
    """word2vec: two tables side by side and a product, no layer behind a layer. Measured: loss 2.82 -> 2.39 in 30
    steps of Adam."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.centre, self.around = nn.Embedding(256, 24), nn.Embedding(256, 24)

        def forward(self, a, b):
            return (self.centre(a) * self.around(b)).sum(-1)

    ids, after = S.text(seed)
    return once(Pairs(), (ids, after, torch.ones(ids.shape)), lambda output, _: -F.logsigmoid(output).mean())


@label("not enough data", family="no gradients")
def evaluation_under_no_grad(seed):
    """A watched loop that only evaluates, under no_grad: there is no gradient to look at. Measured: 134 of 134
    parameters get no gradient; loss 5.61."""
    model, batch = Reader(), S.text(seed, length=10)
    with ks.watch(model, probes=S.PROBES) as session, torch.no_grad():
        for _ in range(3):
            session.log(loss=S.cross_entropy(model(batch[0]), batch))
            session.step()
    return session.run
