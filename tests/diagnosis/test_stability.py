"""A model gets the same headline whatever the seed, the scale of the loss, the batch, the dtype and the steps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import keelscope as ks
from keelscope import models

PROBES = ("default", "sublayers")
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}


def scheme(name, depth, **options):
    return lambda: models.build(name, depth=depth, width=32, heads=4, vocabulary=97, **options)


def plain(depth, gain, activation, *, closed=None):
    """Linear and activation, weights N(0, gain^2 / fan_in); all units of one layer closed where asked."""

    def build():
        model = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(24, 24), activation())), nn.Linear(24, 5))
        for module in model[::2]:
            nn.init.normal_(module.weight, std=gain / module.in_features**0.5)
            nn.init.constant_(module.bias, 0.1)
        if closed is not None:
            nn.init.constant_(model[2 * closed].bias, -100.0)
        return model

    return build


def convolutional():
    widths = [3, 12, 12, 16, 16, 24, 24]
    layers = (
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise(widths)
    )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5))


class Residual(nn.Module):
    """x + gain * F(x) without any norm, 32 times."""

    def __init__(self, gain):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(32))
        self.head, self.gain = nn.Linear(24, 5), gain

    def forward(self, x):
        for block in self.blocks:
            x = x + self.gain * block(x)
        return self.head(x)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=32, n_head=4, vocab_size=97, n_positions=32, **off, **ENDS))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(num_hidden_layers=6, vocab_size=97, pad_token_id=0, **SIZES, **off))


LEVEL = {"flat", "drifting"}
MODELS = {
    "keel 16": (scheme("keel", 16), {"flat"}),
    "keel 64": (scheme("keel", 64), {"flat"}),
    "deepnorm 64": (scheme("deepnorm", 64), {"flat"}),
    "pre_ln 16": (scheme("pre_ln", 16), LEVEL),
    "pre_ln 64": (scheme("pre_ln", 64), LEVEL),
    "post_ln 64": (scheme("post_ln", 64), {"vanishing"}),
    "rezero 16": (scheme("rezero", 16), {"flat"}),
    "tanh vanishing": (plain(20, 0.5, nn.Tanh), {"vanishing"}),
    "sigmoid vanishing": (plain(12, 1.0, nn.Sigmoid), {"vanishing"}),
    "relu exploding": (plain(20, 3.0, nn.ReLU), {"exploding"}),
    "residual exploding": (lambda: Residual(2.0), {"exploding"}),
    "residual sound": (lambda: Residual(0.2), LEVEL),
    "dead relu": (plain(12, 1.4, nn.ReLU, closed=6), {"dead"}),
    "convolutional": (convolutional, LEVEL),
    "gpt2": (gpt2, LEVEL),
    "bert": (bert, LEVEL),
}
QUICK = ("keel 16", "tanh vanishing", "relu exploding", "dead relu", "convolutional")


def batch_for(model, seed, size):
    """Tokens, pictures or vectors, as the model takes them."""
    generator = torch.Generator().manual_seed(1000 + seed)
    kinds = [type(module) for module in model.modules()]
    if nn.Embedding in kinds:
        ids = torch.randint(97, (4 * size, 16), generator=generator)
        return {"input_ids": ids, "labels": ids} if type(model).__module__.startswith("transformers") else (ids, ids)
    shape = (8 * size, 3, 12, 12) if nn.Conv2d in kinds else (32 * size, 24)
    return torch.randn(shape, generator=generator), torch.randint(5, shape[:1], generator=generator)


def headline(name, *, seed=0, scale=1.0, size=1, dtype=torch.float32, steps=1):
    """The headline of one model under one change of circumstances."""
    torch.manual_seed(seed)
    model = MODELS[name][0]().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-12 / scale)  # the model itself stays as it is
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ks.watch(model, optimizer=optimizer, probes=PROBES) as watch:
            for step in range(steps):
                loss_of(model, batch_for(model, seed + step, size), dtype).mul(scale).backward()
                optimizer.step()
                optimizer.zero_grad()
            return ks.diagnose(watch.run).headline


def loss_of(model, batch, dtype):
    if isinstance(batch, Mapping):
        return model(**batch).loss.float()
    x, target = batch
    output = model(x.to(dtype) if x.is_floating_point() else x)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    return F.cross_entropy(output.flatten(0, -2).to(wide), target.flatten())


VARIANTS = {
    **{f"seed {seed}": {"seed": seed} for seed in range(5)},
    **{f"loss x {scale:g}": {"scale": scale} for scale in (1e-9, 1e-4, 1e4, 1e9)},
    "batch x 4": {"size": 4},
    "float64": {"dtype": torch.float64},
    "bfloat16": {"dtype": torch.bfloat16},
    "50 steps": {"steps": 50},
}
IN_CI = ("seed 1", "loss x 1e-09", "loss x 1e+09", "batch x 4", "bfloat16")


def cases():
    for name in MODELS:
        for variant in VARIANTS:
            slow = name not in QUICK or variant not in IN_CI
            yield pytest.param(name, variant, marks=[pytest.mark.slow] if slow else [], id=f"{name}, {variant}")


@pytest.mark.parametrize(("name", "variant"), list(cases()))
def test_the_headline_stays(name, variant, operators):
    if name in ("gpt2", "bert") and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    assert headline(name, **VARIANTS[variant]) in MODELS[name][1]
