from __future__ import annotations

import cmath
import math

import pytest
import torch

from keelscope.models.config import ModelConfig
from keelscope.models.sublayers import Attention, FeedForward, Rotary

CONFIG = ModelConfig(depth=2, width=8, heads=2, bias=True)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def turned(row: list[float], position: int) -> list[float]:
    """Rotary positions as complex numbers, pair by pair."""
    half = len(row) // 2
    pairs = [complex(row[i], row[i + half]) * cmath.exp(1j * position * 10_000 ** (-i / half)) for i in range(half)]
    return [pair.real for pair in pairs] + [pair.imag for pair in pairs]


def slow_attention(branch: Attention, x: torch.Tensor) -> torch.Tensor:
    """One scalar at a time, straight from softmax(q k / sqrt(d)) v."""
    size = x.shape[-1] // branch.heads
    query, key, value = (layer(x).tolist() for layer in (branch.query, branch.key, branch.value))
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            row = []
            for h in range(branch.heads):
                cut = slice(h * size, (h + 1) * size)
                q = turned(query[b][t][cut], t)
                scores = []
                for s in range(t + 1):
                    k = turned(key[b][s][cut], s)
                    scores.append(math.exp(sum(a * c for a, c in zip(q, k, strict=True)) / math.sqrt(size)))
                row += [
                    sum(w * value[b][s][i] for s, w in enumerate(scores)) / sum(scores) for i in range(*cut.indices(99))
                ]
            rows.append(row)
    return branch.output(torch.tensor(rows, dtype=torch.float64).view(x.shape))


def test_attention_is_its_formula():
    torch.manual_seed(0)
    branch = Attention(CONFIG, Rotary(4)).double()
    x = random(2, 5, 8)
    torch.testing.assert_close(branch(x), slow_attention(branch, x))


def test_norms_inside_attention_act_where_they_say():
    torch.manual_seed(0)
    branch = Attention(CONFIG, Rotary(4)).double()
    x = random(2, 5, 8)
    plain = branch(x)
    branch.inner_norm = torch.nn.RMSNorm(8, eps=0.0).double()
    joined = torch.linalg.lstsq(branch.output.weight, (plain - branch.output.bias).reshape(10, 8).T).solution.T
    expected = branch.output(joined / joined.square().mean(-1, keepdim=True).sqrt())
    torch.testing.assert_close(branch(x).view(10, 8), expected)
    branch.query_norm = branch.key_norm = torch.nn.RMSNorm(4, eps=0.0).double()
    scaled = Attention(CONFIG, Rotary(4)).double()
    scaled.load_state_dict(branch.state_dict(), strict=False)
    scaled.query_norm, scaled.key_norm, scaled.inner_norm = branch.query_norm, branch.key_norm, branch.inner_norm
    with torch.no_grad():
        for layer in (scaled.query, scaled.key):
            layer.weight *= 7
            layer.bias *= 7
    torch.testing.assert_close(branch(x), scaled(x))


@pytest.mark.parametrize("kind", ["gelu", "relu", "swiglu"])
def test_feed_forward_is_its_formula(kind):
    torch.manual_seed(0)
    branch = FeedForward(ModelConfig(depth=2, width=8, heads=2, feed_forward=kind, expansion=2)).double()
    x = random(2, 3, 8)
    hidden = x @ branch.hidden.weight.T
    if kind == "gelu":
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    elif kind == "relu":
        hidden = hidden * (hidden > 0)
    else:
        gate = x @ branch.gate.weight.T
        hidden = gate / (1 + torch.exp(-gate)) * hidden
    assert hidden.shape[-1] == 16
    torch.testing.assert_close(branch(x), hidden @ branch.output.weight.T)


@pytest.mark.parametrize("shift", [1, 17, 500])
def test_rotary_products_depend_on_the_distance_only(shift):
    rotary = Rotary(16)
    query, key = random(16), random(16).flip(0)
    queries = rotary(query.expand(1, 1, 600, 16))[0, 0]
    keys = rotary(key.expand(1, 1, 600, 16))[0, 0]
    near = (queries[30] * keys[10]).sum()
    torch.testing.assert_close((queries[30 + shift] * keys[10 + shift]).sum(), near)
    assert (near - (queries[30] * keys[11]).sum()).abs() > 1e-3
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(600))


def test_rotary_tables_follow_precision_and_length():
    rotary = Rotary(4)
    short = rotary(random(1, 1, 3, 4))
    long = rotary(random(1, 1, 3, 4).repeat(1, 1, 10, 1))
    assert torch.equal(long[:, :, :3], short)
    half = rotary(random(1, 1, 3, 4).bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), short, rtol=0.02, atol=0.02)


def test_dropout_acts_in_training_only():
    branch = FeedForward(ModelConfig(depth=2, width=8, heads=2, dropout=0.5)).double()
    x = random(4, 50, 8)
    dropped = (branch(x) == 0).double().mean()
    assert 0.4 < dropped < 0.6
    assert not (branch.eval()(x) == 0).any()
