"""Frobenius norms from random signs: unbiased, with the variance of the formula and an error estimate that holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keelscope.jacobian.operators import frobenius, matrix_operator, relative_squares, signs

SCHEMES = ("pre_ln", "post_ln", "keel")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrices(rows: int = 5, columns: int = 4):
    seeds = st.integers(0, 1000)
    return seeds.map(lambda seed: torch.randn(rows, columns, dtype=torch.float64, generator=generator(seed)))


def predicted_spread(jacobian: torch.Tensor) -> float:
    """Relative standard deviation of one estimate of |J|_F^2 by random signs."""
    square = jacobian @ jacobian.T
    return float((2 * (square.square().sum() - square.diagonal().square().sum())).sqrt() / square.trace())


def test_signs_are_signs():
    drawn = signs(torch.Size([100, 100]), generator(), torch.float32)
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    assert abs(drawn.mean().item()) < 0.03
    assert abs((drawn[1:] * drawn[:-1]).mean().item()) < 0.03


def test_signs_leave_the_users_draws_alone():
    before = torch.get_rng_state()
    signs(torch.Size([9]), generator(), torch.float32)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("factor", [0.0, 1.0, 1e-12, 3e8])
def test_exact_where_the_jacobian_has_orthogonal_rows(factor, orthogonal):
    norm, error = frobenius(matrix_operator(factor * orthogonal(7)[:5]), 4, generator=generator())
    assert norm == pytest.approx(factor * math.sqrt(5), rel=1e-12)
    assert error == pytest.approx(0, abs=1e-7 * factor)


@given(matrices())
def test_all_signs_average_to_the_norm(matrix):
    """Over every one of the 2^5 sign vectors the estimate is the norm itself: it is unbiased."""
    vectors = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 5)
    mean = torch.stack([matrix_operator(matrix).vjp(r).square().sum() for r in vectors]).mean()
    assert float(mean) == pytest.approx(float(matrix.square().sum()), rel=1e-12)


@given(matrices(), st.floats(-8, 8), st.integers(0, 99))
def test_scales_with_the_jacobian(matrix, exponent, seed):
    scale = 10.0**exponent
    once = frobenius(matrix_operator(matrix), 3, generator=generator(seed))
    scaled = frobenius(matrix_operator(scale * matrix), 3, generator=generator(seed))
    assert scaled == pytest.approx([scale * value for value in once], rel=1e-9)


@given(matrices(), st.integers(0, 99))
def test_a_rotated_input_changes_nothing(matrix, seed):
    rotation = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=generator(seed)))[0]
    once = frobenius(matrix_operator(matrix), 3, generator=generator(seed))
    rotated = frobenius(matrix_operator(matrix @ rotation), 3, generator=generator(seed))
    assert rotated == pytest.approx(once, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_spread_of_one_product_is_the_predicted_one(scheme, block):
    jacobian = block(scheme).jacobian
    squares = relative_squares(block(scheme).operator(), 400, generator())
    assert float(squares.mean()) == pytest.approx(float(jacobian.square().sum()) / 256, rel=4 * 0.2 / 20)
    assert float(squares.std() / squares.mean()) == pytest.approx(predicted_spread(jacobian), rel=0.12)


def test_keel_blocks_are_the_easy_ones(block):
    """Near the identity, random signs have almost no variance: .016 against .12 of Pre-LN and Post-LN."""
    spread = {scheme: predicted_spread(block(scheme).jacobian) for scheme in SCHEMES}
    assert 0.08 < spread["pre_ln"] < 0.16
    assert 0.08 < spread["post_ln"] < 0.18
    assert spread["keel"] < 0.03


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("probes", [4, 8])
def test_the_error_estimate_covers_the_truth(scheme, probes, block):
    """Over 100 seeds: the truth lies within t_{n-1}(95 %) errors as often as it should, and the errors are unbiased."""
    one = block(scheme)
    operator, truth = matrix_operator(one.jacobian), float(torch.linalg.norm(one.jacobian))
    found = torch.tensor([frobenius(operator, probes, generator=generator(seed)) for seed in range(100)])
    off = (found[:, 0] - truth).abs()
    quantile = {4: 3.182, 8: 2.365}[probes]
    assert 0.88 <= float((off < quantile * found[:, 1]).double().mean()) <= 1.0
    assert float(found[:, 1].square().mean().sqrt() / found[:, 0].std()) == pytest.approx(1, abs=0.25)
