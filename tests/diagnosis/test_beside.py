"""Stacks beside the main one: each is judged by the same rules, the worst makes the headline."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import keelscope as ks
from keelscope.diagnosis import Severity, compare, diagnose

WIDTH = 32


class Pre(nn.Module):
    """A Pre-LN block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Post(Pre):
    """A Post-LN block whose branches point along their stream: each norm divides the gradient by three."""

    def forward(self, x):
        return self.norm(x + 2.0 * x.detach() + 0.01 * self.mlp(x))


class Plain(nn.Module):
    """A layer without shortcut; each gain above 1.4 makes the gradient grow."""

    def __init__(self, gain):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.normal_(self.linear.weight, std=gain / WIDTH**0.5)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Towers(nn.Module):
    """Two towers whose outputs are read together."""

    def __init__(self, left, right, *, cut=False, gate=1.0):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.left, self.right = nn.ModuleList(left), nn.ModuleList(right)
        self.head = nn.Linear(2 * WIDTH, 5)
        self.gate = nn.Parameter(torch.tensor(gate))
        self.cut = cut

    def forward(self, x):
        left, right = self.first(x), self.second(x)
        for block in self.left:
            left = block(left)
        for block in self.right:
            right = block(right)
        right = right.detach() if self.cut else right
        return self.head(torch.cat([left, self.gate * right], -1))


def report_of(model, *, steps=1, loss=None):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3)
    with ks.watch(model, optimizer=optimizer) as watch:
        for _ in range(steps):
            optimizer.zero_grad()
            if loss is None:
                F.cross_entropy(model(torch.randn(16, WIDTH)), torch.randint(5, (16,))).backward()
            else:
                loss(model).backward()
            optimizer.step()
    return diagnose(watch.run)


def alarms(report):
    return [str(finding) for finding in report.findings if finding.severity >= Severity.WARNING]


def blocks(kind, number, *arguments):
    torch.manual_seed(3)
    return [kind(*arguments) for _ in range(number)]


def test_two_healthy_towers_are_both_judged():
    report = report_of(Towers(blocks(Pre, 12), blocks(Pre, 8)))
    assert [(stack.path, stack.headline.word) for stack in report.stacks] == [("left", "flat"), ("right", "flat")]
    assert report.sentence.startswith("In left, as in the other stack, gradient RMS stays level")
    assert report.axis.stack.path == "left"
    assert alarms(report) == []
    assert any(note.startswith("2 stacks are judged, the worst makes the headline: left flat") for note in report.notes)


@pytest.mark.parametrize(
    ("sick", "headline"),
    [((Post, 8), "vanishing"), ((Plain, 8, 0.3), "vanishing"), ((Plain, 8, 6.0), "exploding")],
)
def test_a_shorter_tower_that_is_sick_makes_the_headline(sick, headline):
    report = report_of(Towers(blocks(Pre, 12), blocks(*sick)))
    assert report.headline == headline
    assert report.sentence.startswith("In right, the worst of 2 stacks, ")
    (finding,) = (found for found in report.findings if found.rule == headline)
    assert " of right: S = " in finding.statement
    assert all(site.startswith("right.") for site in finding.sites)
    assert [site.path for site in report.axis.sites] == [f"right.{i}" for i in range(8)]
    assert {layer.path for layer in report.layers if layer.depth is not None} == {f"right.{i}" for i in range(8)}
    assert len(report.profile.shape.levels) == 8
    told = {stack["path"]: stack["headline"] for stack in report.to_dict()["stacks"]}
    assert told == {"left": "flat", "right": headline}


def test_the_worse_of_two_sick_stacks_makes_the_headline_and_both_are_found():
    report = report_of(Towers(blocks(Plain, 9, 0.5), blocks(Plain, 8, 0.2)))
    assert report.sentence.startswith("In right, the worst of 2 stacks, ")
    assert [f.sites[0].partition(".")[0] for f in report.findings if f.rule == "vanishing"] == ["left", "right"]
    again = report_of(Towers(blocks(Plain, 9, 0.2), blocks(Plain, 8, 0.5)))
    assert again.sentence.startswith("In left, the worst of 2 stacks, ")


def test_a_tower_that_is_detached_or_multiplied_by_zero_is_dead():
    cut = report_of(Towers(blocks(Pre, 12), blocks(Pre, 6), cut=True))
    assert cut.headline == "dead"
    assert cut.sentence.startswith("In right, the worst of 2 stacks, no gradient reaches 6 of 6 layers")
    model = Towers(blocks(Pre, 12), blocks(Pre, 6), gate=0.0)
    model.gate.requires_grad = False
    closed = report_of(model, steps=3)
    assert closed.headline == "dead"
    (zero,) = (finding for finding in closed.findings if finding.rule == "zero_gradient")
    assert zero.severity is Severity.ERROR


def test_a_tower_behind_a_weight_that_starts_at_zero_is_not_dead():
    report = report_of(Towers(blocks(Pre, 12), blocks(Pre, 6), gate=0.0))
    assert report.headline == "flat"
    assert alarms(report) == []


def test_a_frozen_tower_is_no_news():
    model = Towers(blocks(Pre, 12), blocks(Pre, 6))
    for parameter in (*model.right.parameters(), *model.second.parameters()):
        parameter.requires_grad = False
    report = report_of(model)
    assert (report.headline, alarms(report)) == ("flat", [])
    assert len(report.stacks) == 1


class Heads(nn.Module):
    """A stack, and heads of all sizes beside each other that read its end."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Pre() for _ in range(8))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return sum(10.0 ** (-2 * i) * head(x) for i, head in enumerate(self.heads))


class Turns(nn.Module):
    """Layers and their norms in a list each: one chain."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(12))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(0.05 * layer(0.05 * norm(x)))
        return self.head(x)


@pytest.mark.parametrize("model", [Heads, Turns])
def test_what_is_no_chain_of_its_own_is_not_judged(model):
    torch.manual_seed(0)
    report = report_of(model())
    assert len(report.stacks) == 1
    assert len([finding for finding in report.findings if finding.rule in ("vanishing", "exploding")]) <= 1


def test_runs_are_compared_along_the_stack_that_a_headline_is_about():
    sick = report_of(Towers(blocks(Pre, 12), blocks(Plain, 8, 0.3)))
    sound = report_of(Towers(blocks(Pre, 12), blocks(Plain, 8, 1.4)))
    both = compare(sound, sick)
    assert both.gradient.edges[-1] == 8
    assert both.gradient.levels[0, 0] - both.gradient.levels[1, 0] > 3
    assert compare(sound, sound).gradient.edges[-1] == 12


def test_the_file_knows_which_stacks_are_chains(tmp_path):
    model = Towers(blocks(Pre, 6), blocks(Pre, 4))
    with ks.watch(model, tmp_path / "run.h5") as watch:
        model(torch.randn(2, WIDTH)).sum().backward()
        watch.step()
    with ks.open_run(tmp_path / "run.h5") as run:
        assert [(stack.path, stack.chained) for stack in run.info.stacks] == [("left", True), ("right", True)]


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"num_layers": 6, "num_decoder_layers": 4, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4}
    ids = torch.arange(48).reshape(4, 12) % 90 + 2
    model = T5ForConditionalGeneration(T5Config(vocab_size=96, decoder_start_token_id=0, **sizes))
    return model, lambda m: m(input_ids=ids, labels=ids).loss


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 4), ("ffn_dim", 64))
    }
    config = WhisperConfig(
        vocab_size=96, d_model=32, encoder_layers=4, decoder_layers=6, num_mel_bins=8, max_source_positions=32,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, **sizes,
    )  # fmt: skip
    sound, ids = torch.randn(2, 8, 64), torch.arange(24).reshape(2, 12) % 90 + 3
    return WhisperForConditionalGeneration(config), lambda m: m(input_features=sound, labels=ids).loss


def clip():
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = {**tower, "num_hidden_layers": 5, "vocab_size": 96, "max_position_embeddings": 16, "eos_token_id": 95}
    vision = {**tower, "num_hidden_layers": 8, "image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    ids, pictures = torch.randint(3, 90, (6, 10)), torch.randn(6, 3, 32, 32)
    ids[:, -1] = 95
    return model, lambda m: m(input_ids=ids, pixel_values=pictures, return_loss=True).loss


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("make", [t5, whisper, clip])
def test_two_stacks_of_a_library_are_healthy(make, operators):
    torch.manual_seed(0)
    model, loss = make()
    report = report_of(model, loss=loss)
    assert (report.headline in ("flat", "drifting"), alarms(report)) == (True, [])
    assert len(report.stacks) == 2


def faded(_module, _arguments, output):
    """The same output, of which a tenth of the gradient gets through."""
    whole = output[0] if isinstance(output, tuple) else output
    faint = 0.1 * whole + 0.9 * whole.detach()
    return (faint, *output[1:]) if isinstance(output, tuple) else faint


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_faded_encoder_of_a_library_is_named(operators):
    torch.manual_seed(0)
    model, loss = clip()
    for layer in model.text_model.encoder.layers:
        layer.register_forward_hook(faded)
    report = report_of(model, loss=loss)
    assert report.headline == "vanishing"
    assert "In text_model.encoder.layers, the worst of 2 stacks" in report.sentence


class UNet(nn.Module):
    """Five levels down, five up, with skips."""

    def __init__(self):
        super().__init__()
        sizes = [8, 8, 16, 16, 32, 32]
        pairs = list(pairwise(sizes))
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList(self.level(a, b) for a, b in pairs)
        self.up = nn.ModuleList(self.level(b + a, a) for a, b in reversed(pairs))
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    @staticmethod
    def level(inside, outside):
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU())

    def forward(self, x):
        x, skips = self.first(x), []
        for level in self.down:
            skips.append(x)
            x = F.avg_pool2d(level(x), 2)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.last(x)


def test_the_arms_of_a_healthy_unet_are_quiet():
    torch.manual_seed(0)
    picture = torch.randn(2, 3, 64, 64)
    report = report_of(UNet(), loss=lambda model: (model(picture) - picture).square().mean())
    assert (report.headline in ("flat", "drifting"), alarms(report)) == (True, [])
