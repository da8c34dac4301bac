"""Sums that are no residual additions, additions inside branches, and how many steps a search takes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keelscope.topology import terms
from keelscope.topology.graph import Graph


def test_plain_mlp(look):
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.ReLU())])
    found = look(model, torch.randn(3, 8))
    assert (len(found), found.schemes, found.unknown) == (0, (), ())


class UNet(nn.Module):
    """Skip connections by concatenation: not a sum."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(c, d, 3, padding=1) for c, d in ((3, 4), (4, 8), (8, 8)))
        self.up = nn.ModuleList(nn.Conv2d(c, d, 3, padding=1) for c, d in ((16, 4), (8, 4)))

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = F.interpolate(x, scale_factor=4)
        x = self.up[0](torch.cat([x, skips[1]], 1))
        return self.up[1](torch.cat([F.interpolate(x, scale_factor=2), skips[0]], 1))


def test_concatenation_is_no_sum(look):
    assert len(look(UNet(), torch.randn(2, 3, 16, 16))) == 0


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrence_over_time_is_no_depth(cell, look):
    class Net(nn.Module):
        """An embedding, a recurrent layer, a head."""

        def __init__(self):
            super().__init__()
            self.embedding, self.cell, self.head = nn.Embedding(20, 8), cell(8, 8, 2, batch_first=True), nn.Linear(8, 4)

        def forward(self, tokens):
            return self.head(self.cell(self.embedding(tokens))[0])

    assert len(look(Net(), torch.ones(2, 5, dtype=torch.int64))) == 0


def gelu_in_pieces(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def rotated(x):
    angle = torch.arange(6.0)[:, None]
    return x * angle.cos() + torch.cat([-x[..., 4:], x[..., :4]], -1) * angle.sin()


def masked(b, x):
    scores = rotated(b.gates(x)) @ rotated(b.gates(x)).mT
    mask = torch.triu(torch.full((6, 6), -1e9), 1)
    return (scores + mask).softmax(-1) @ x


SINGLE = {
    "activation": lambda b, x: x + b.fall(gelu_in_pieces(b.rise(b.norm(x)))),
    "attention": lambda b, x: x + b.gates(masked(b, b.norm(x))),
    "bias": lambda b, x: x + (b.norm(x) @ b.gates.weight + b.scale),
    "low-rank update": lambda b, x: x + b.gates(b.norm(x)) + 2.0 * (b.norm(x) @ b.rise.weight.mT @ b.fall.weight.mT),
    "squeeze and excite": lambda b, x: x + b.branch(b.norm(x)) * b.gates(x.mean(1, keepdim=True)).sigmoid(),
    "swiglu": lambda b, x: x + b.gates(F.silu(b.gates(b.norm(x))) * b.gates(b.norm(x))),
    "cumulative sum": lambda b, x: x + b.gates(b.norm(x)).cumsum(1),
}


@pytest.mark.parametrize("name", SINGLE)
def test_sums_inside_a_branch(name, look, stack, tokens):
    found = look(stack(SINGLE[name]), tokens)
    expected = 6 if name == "low-rank update" else 3  # x + A + B: two sums, each with one branch
    assert len(found) == expected
    assert found.further == ()


class SharedBias(nn.Module):
    """T5: a table of position biases is made in the first block and added to the scores of all."""

    def __init__(self, depth):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.bias = nn.Embedding(12, 1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, tokens):
        x = self.embedding(tokens)
        steps = torch.arange(tokens.shape[1])
        bias = self.bias(steps[:, None] - steps + 6).squeeze(-1)
        for block in self.blocks:
            scores = block(x) @ x.mT + bias
            x = x + block(scores.softmax(-1) @ x)
        return x


class Injected(nn.Module):
    """A mixture of the stream and the embedding before every block, as in nanoGPT speedruns."""

    def __init__(self, depth):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.mix = nn.Parameter(torch.ones(depth, 2))

    def forward(self, tokens):
        first = x = self.embedding(tokens)
        for block, (keep, again) in zip(self.blocks, self.mix, strict=True):
            x = keep * x + again * first
            x = x + block(x).relu()
        return x


class Queries(nn.Module):
    """DETR: learned positions are added to what attention reads, in every block."""

    def __init__(self, depth):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.position = nn.Parameter(torch.randn(6, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            query = x + self.position
            x = x + block((query @ query.mT).softmax(-1) @ x)
        return x


class TwoStreams(nn.Module):
    """A branch that reads and writes a normalised and a plain stream."""

    def __init__(self, depth):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, tokens):
        x = y = self.embedding(tokens)
        for block in self.blocks:
            output = block(x + self.norm(y)).relu()
            x, y = self.norm(x + output), y + output
        return x + y


@pytest.mark.parametrize("net", [SharedBias, Injected, Queries, TwoStreams])
def test_what_all_blocks_share_is_no_stream(net, look, tokens):
    found = look(net(5), tokens)
    assert len(found) == 5
    assert len(found.further) == (5 if net is TwoStreams else 0)
    assert {record.stream for record in found.sublayers} == {0}


@pytest.mark.parametrize("net", [SharedBias, Injected, Queries, TwoStreams])
def test_steps_grow_with_depth_and_not_faster(net, look, tokens, monkeypatch):
    """Four times the depth, four times the tensors looked at."""
    from keelscope.topology import additions, trails

    calls = []

    def counted(*arguments):
        calls.append(1)
        return terms.sources(*arguments)

    for module in (additions, trails):
        monkeypatch.setattr(module, "sources", counted)
    counts = []
    for depth in (8, 32, 128):
        calls.clear()
        look(net(depth), tokens)
        counts.append(len(calls))
    assert (counts[2] - counts[1]) / (counts[1] - counts[0]) == pytest.approx(4, rel=0.1)


def test_additions_of_a_llama(look, operators):
    """25 sums in four blocks, of which eight are residual: the others are rotary positions and epsilons."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 50, (2, 6))
    assert Graph([model(ids).logits.grad_fn]).names.count("Add") == 25
    assert len(look(model, (ids,))) == 8


def test_addition_inside_a_branch(look, stack, tokens):
    """A feed-through inside the branch (Mamba's D) is no sub-layer of its own."""

    def scan(block, x):
        u = block.gates(block.norm(x))
        return x + block.gates(block.scale * u + block.branch(u))

    found = look(stack(scan), tokens)
    assert found.forms() == {"x + F(n x)": 3}
    assert [(record.form, record.part_of) for record in found.further] == [("a x + F(x)", i) for i in range(3)]


def test_residual_in_residual(look, stack, tokens):
    """A long skip around blocks with skips of their own (RCAN)."""

    def group(block, x):
        y = x
        for _ in range(3):
            y = y + block.branch(block.norm(y))
        return x + block.gates(y)

    found = look(stack(group, depth=2), tokens)
    assert len(found) == 2
    assert [record.part_of for record in found.further] == [0, 0, 0, 1, 1, 1]


def test_encoder_memory_is_no_stream_of_the_decoder(look, tokens):
    """The decoder's embedding is made first, the encoder runs, the decoder attends to it."""

    class Both(nn.Module):
        """Cross-attention to a stack that ran in between."""

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.decoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, tokens):
            y = self.embedding(tokens)
            x = self.embedding(tokens)
            for layer in self.encoder:
                x = x + layer(x).relu()
            for layer in self.decoder:
                y = y + layer((y @ x.mT).softmax(-1) @ x)
            return y

    found = look(Both(), tokens)
    assert [record.stream for record in found.sublayers] == [0, 0, 0, 1, 1]
    assert found.further == ()


def test_a_loss_made_of_many_terms_is_no_stream(look, stack, tokens):
    model = stack(lambda b, x: x + b.branch(b.norm(x)))
    found = look(
        model, tokens, lambda output, _: output.square().mean() + sum(p.square().sum() for p in model.parameters())
    )
    assert len(found) == 3


def test_second_call_of_a_model_is_not_counted_twice(look, stack, tokens):
    class Pair(nn.Module):
        """The same tower on two inputs."""

        def __init__(self):
            super().__init__()
            self.tower = stack(lambda b, x: b.norm(x + b.branch(x)))

        def forward(self, tokens):
            return (self.tower(tokens) * self.tower(tokens.flip(1))).sum(-1)

    found = look(Pair(), tokens)
    assert [record.site for record in found.sublayers] == [f"tower.blocks.{i}" for i in range(3)]
    assert [record.part_of for record in found.further] == [0, 1, 2]


def test_shared_weights_are_depth(look, tokens):
    """ALBERT: one block, applied again and again."""

    class Shared(nn.Module):
        """One block, four times."""

        def __init__(self):
            super().__init__()
            self.embedding, self.block, self.norm = nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, tokens):
            x = self.embedding(tokens)
            for _ in range(4):
                x = self.norm(x + self.block(x).relu())
            return x

    found = look(Shared(), tokens)
    assert found.forms() == {"n(x + F(x))": 4}
    assert found.schemes == (("post_ln",),)
