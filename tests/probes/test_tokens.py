"""Likeness of tokens, against pairs of tokens taken one by one and the eigenvalues of their Gram matrix."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import keelscope as ks
from keelscope.models import build
from keelscope.testing import check_probe
from keelscope_probes import tokens
from keelscope_probes.tokens import COSINE_SIMILARITY, EFFECTIVE_RANK, TOKENS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def brute_force(x: Tensor) -> tuple[float, float]:
    """Mean cosine over pairs and participation ratio of the eigenvalues, sequence by sequence."""
    cosines, ranks = [], []
    for sequence in x.double().numpy():
        units = [token / np.linalg.norm(token) for token in sequence if np.linalg.norm(token) > 0]
        if len(units) > 1:
            cosines.append(np.mean([a @ b for a, b in itertools.combinations(units, 2)]))
            eigenvalues = np.linalg.eigvalsh(np.array(units) @ np.array(units).T)
            ranks.append(eigenvalues.sum() ** 2 / np.square(eigenvalues).sum())
    return (np.mean(cosines), np.mean(ranks)) if cosines else (math.nan, math.nan)


def found(x: Tensor) -> tuple[float, float]:
    return COSINE_SIMILARITY.value(x), EFFECTIVE_RANK.value(x)


def test_conformance():
    check_probe(TOKENS)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 4), length=st.integers(1, 9), width=st.integers(1, 12),
    shift=st.sampled_from([0.0, 1.0, 30.0]), seed=st.integers(0, 99), zeros=st.integers(0, 3),
)  # fmt: skip
def test_brute_force(batch, length, width, shift, seed, zeros):
    x = random(batch, length, width, seed=seed) + shift
    x[:, :zeros] = 0
    np.testing.assert_allclose(found(x), brute_force(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(2, 8, 5), (2, 5, 8), (1, 300, 16), (3, 4, 300)])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.float16, 2e-6), (torch.bfloat16, 2e-6)]
)
def test_every_dtype_is_measured_as_it_is(dtype, error, shape):
    """The entries of half precision are exact numbers; nothing else is rounded to half precision."""
    x = (random(*shape) + 0.5).to(dtype)
    np.testing.assert_allclose(found(x), brute_force(x), rtol=error, atol=error)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e30])
def test_size_of_a_token_does_not_count(size):
    x = random(2, 6, 4).float()
    scaled = x * torch.tensor([size, 1, 1, 1, 1, 1]).reshape(1, 6, 1)
    np.testing.assert_allclose(found(scaled), found(x), rtol=1e-5)


def test_half_precision_does_not_overflow():
    x = torch.full((1, 4, 64), 6e4, dtype=torch.float16)
    assert found(x) == pytest.approx((1, 1), abs=1e-6)


def test_known_answers():
    same, apart = torch.ones(2, 5, 3), torch.eye(4).reshape(1, 4, 4)
    opposite = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    assert found(same) == pytest.approx((1, 1))
    assert found(apart) == pytest.approx((0, 4))
    assert found(opposite) == pytest.approx((-1, 1))


def test_sequences_without_a_pair_say_nothing():
    one, nothing = torch.ones(3, 1, 4), torch.zeros(2, 5, 4)
    assert all(
        map(math.isnan, (*found(one), *found(nothing), *found(torch.ones(0, 5, 4)), *found(torch.ones(2, 0, 4))))
    )
    lonely = torch.zeros(1, 5, 4)
    lonely[0, 2] = 1
    assert all(map(math.isnan, found(lonely)))
    assert found(torch.cat([lonely, torch.ones(1, 5, 4)])) == pytest.approx((1, 1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    x = torch.ones(2, 4, 3)
    x[1, 2, 0] = bad
    assert all(map(math.isnan, found(x)))


def test_sequences_taken_a_few_at_a_time(monkeypatch):
    x = random(7, 5, 6)
    whole = found(x)
    monkeypatch.setattr(tokens, "_AT_ONCE", 70)
    np.testing.assert_allclose(found(x), whole, rtol=1e-14)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(split=st.integers(0, 5), length=st.integers(0, 6), seed=st.integers(0, 99))
def test_merge_law(split, length, seed):
    """of(a ++ b) == merge(of(a), of(b)), joined along the batch."""
    x = random(5, length, 4, seed=seed)
    terms = EFFECTIVE_RANK.terms
    a, b, whole = (terms.of(part).numpy() for part in (x[:split], x[split:], x))
    np.testing.assert_allclose(terms.merge(a, b), whole, rtol=1e-12)


def test_under_autocast():
    x = random(2, 40, 8).float() + 0.5
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_allclose(found(x), brute_force(x), rtol=2e-6)


def test_only_three_dimensions_are_looked_at():
    assert TOKENS.view((torch.ones(2, 3),), nn.Sequential(nn.ReLU())) is None
    assert TOKENS.view((torch.ones(2, 3, 4, 5),), nn.Sequential(nn.ReLU())) is None
    assert TOKENS.view((torch.ones(2, 3, 4, dtype=torch.complex64),), nn.Sequential(nn.ReLU())) is None


class Averaging(nn.Module):
    """Uniform attention without a shortcut: one layer makes all tokens equal."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x.mean(1, keepdim=True).expand_as(x))


def test_a_collapse_is_seen_where_it_happens():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Averaging(), Averaging())
    with ks.watch(model, probes="tokens", sites="all") as watch:
        model(torch.randn(3, 6, 8)).sum().backward()
    cosine, rank = watch.run["tokens/cosine_similarity"], watch.run["tokens/effective_rank"]
    by_path = dict(zip([site.path for site in cosine.sites], cosine.values[0], strict=True))
    assert by_path["1"] == pytest.approx(1, abs=1e-6)
    assert by_path["0"] < 0.5
    assert rank.values[0, [site.path for site in rank.sites].index("2")] == pytest.approx(1, abs=1e-5)


def test_recorded_numbers_over_micro_batches():
    """Entries of a real stack, on every tenth recorded step, merged over two forwards."""
    model = build("pre_ln", depth=4, width=16, heads=2, vocabulary=11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randint(0, 11, (size, 7), generator=torch.Generator().manual_seed(size)) for size in (2, 3)]
    seen: list[Tensor] = []
    handle = model.sublayers[2].register_forward_hook(lambda _m, _i, output: seen.append(output.detach()))
    with ks.watch(model, optimizer=optimizer, probes="tokens") as watch:
        for _ in range(11):
            for batch in batches:
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    handle.remove()
    series = [watch.run[f"tokens/{name}"] for name in ("cosine_similarity", "effective_rank")]
    assert series[0].steps.tolist() == [0, 10]
    place = [site.path for site in series[0].sites].index("sublayers.2")
    for row, step in enumerate((0, 10)):
        wanted = brute_force(torch.cat(seen[2 * step : 2 * step + 2]))
        np.testing.assert_allclose([one.values[row, place] for one in series], wanted, rtol=1e-5)
