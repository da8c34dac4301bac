"""Lyapunov exponents of chains: closed forms, determinants, eigenvalues, and explicitly multiplied Jacobians."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import digamma

from keelscope.jacobian.lyapunov import lyapunov_exponents, orthonormal, random_frame
from keelscope.jacobian.operators import matrix_operator


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator(seed))


def rotation(size: int, seed: int) -> torch.Tensor:
    return torch.linalg.qr(drawn(size, size, seed))[0]


def exponents(chain: list[torch.Tensor], count: int, seed: int = 0) -> np.ndarray:
    """Of Jacobians given from the top down."""
    operators = [matrix_operator(matrix) for matrix in chain]
    return lyapunov_exponents(operators, count, generator=generator(seed)).numpy()


@given(st.integers(1, 6), st.integers(1, 8), st.floats(-30, 30), st.integers(0, 99))
def test_scaled_rotations(size, length, decades, seed):
    chain = [10.0**decades * rotation(size, seed + i) for i in range(length)]
    np.testing.assert_allclose(exponents(chain, size), decades, atol=1e-9)


def test_a_long_diagonal_chain_gives_its_entries():
    chain = [torch.diag(torch.tensor([0.01, 10.0, 1.0], dtype=torch.float64))] * 200
    np.testing.assert_allclose(exponents(chain, 3), [1, 0, -2], atol=1.5 / 200)


def test_no_overflow_and_no_underflow():
    for top in (30, -30):
        chain = [torch.diag(torch.tensor([10.0**top, 10.0 ** (top - 6)], dtype=torch.float64))] * 100
        np.testing.assert_allclose(exponents(chain, 2), [top, top - 6], atol=0.05)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 99))
def test_all_together_are_the_determinant(size, length, seed):
    chain = [drawn(size, size, seed + i) for i in range(length)]
    logs = sum(float(torch.linalg.slogdet(matrix)[1]) for matrix in chain) / math.log(10)
    assert exponents(chain, size).sum() * length == pytest.approx(logs, rel=1e-8, abs=1e-8)


@given(st.floats(-10, 10), st.integers(0, 99))
def test_scaling_every_jacobian_shifts_all(decades, seed):
    chain = [drawn(5, 5, seed + i) for i in range(6)]
    np.testing.assert_allclose(
        exponents([10.0**decades * matrix for matrix in chain], 3), exponents(chain, 3) + decades, atol=1e-9
    )


@given(st.integers(0, 99))
def test_rotations_between_the_jacobians_change_nothing(seed):
    chain = [drawn(4, 4, seed + i) for i in range(6)]
    turns = [torch.eye(4, dtype=torch.float64), *(rotation(4, seed + 50 + i) for i in range(6))]
    turned = [turns[i].T @ matrix @ turns[i + 1] for i, matrix in enumerate(chain)]
    np.testing.assert_allclose(exponents(turned, 2), exponents(chain, 2), atol=1e-8)


def test_powers_of_one_matrix_give_its_eigenvalues():
    values = torch.tensor([2.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    basis = drawn(4, 4, 3)
    matrix = basis @ torch.diag(values) @ torch.linalg.inv(basis)
    np.testing.assert_allclose(exponents([matrix] * 400, 4), values.log10(), atol=5e-3)


def test_gaussian_matrices_have_known_exponents():
    """Newman 1986: (log 2 + psi((d - i + 1) / 2)) / 2 for independent standard normal entries."""
    size, length = 6, 3000
    chain = [drawn(size, size, seed) for seed in range(length)]
    exact = [(math.log(2) + digamma((size - i) / 2)) / 2 / math.log(10) for i in range(size)]
    np.testing.assert_allclose(exponents(chain, size), exact, atol=0.03)


@pytest.mark.parametrize("length", [1, 3, 10])
def test_explicit_products(length):
    """What the frame spans has exactly the volume that the multiplied Jacobians give it."""
    size = 6
    chain = [drawn(size, size, 10 + i) for i in range(length)]
    product = torch.linalg.multi_dot([*chain, torch.eye(size, dtype=torch.float64)]) if length > 1 else chain[0]
    frame = random_frame(size, 3, generator(), torch.float64)
    found = exponents(chain, 3) * length
    for k in (1, 2, 3):
        volume = torch.linalg.svdvals(frame[:k] @ product).log10().sum()
        assert found[:k].sum() == pytest.approx(float(volume), abs=1e-9)
    assert found[0] <= float(torch.linalg.svdvals(product)[0].log10())


def test_the_leading_exponents_converge_to_the_singular_values_of_the_product():
    """With an error of the order of 1 / length, from the random start."""
    size, errors = 6, []
    for length in (4, 16, 40):
        chain = [rotation(size, i) @ torch.diag(torch.logspace(0.5, -0.5, size)).double() for i in range(length)]
        product = torch.linalg.multi_dot(chain)
        sigma = torch.linalg.svdvals(product)[:2].log10() / length
        errors.append(float(np.abs(exponents(chain, 2) - sigma.numpy()).max()) * length)
    assert max(errors) < 1.0


@pytest.mark.parametrize("scheme", ["pre_ln", "post_ln", "keel"])
def test_blocks_on_live_graphs(scheme, block):
    one = block(scheme)
    frame = random_frame(256, 2, generator(), torch.float64)
    found = lyapunov_exponents([one.operator()] * 3, 2, generator=generator())
    product = one.jacobian @ one.jacobian @ one.jacobian
    assert float(found.sum()) * 3 == pytest.approx(float(torch.linalg.svdvals(frame @ product).log10().sum()), abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lost_directions(dtype):
    """Rank 1: one exponent stays, the others are -inf and not noise."""
    matrix = torch.outer(torch.arange(1.0, 5), torch.ones(4)).to(dtype)
    found = lyapunov_exponents([matrix_operator(matrix)] * 3, 2, generator=generator()).numpy()
    assert np.isfinite(found[0])
    assert found[1] == -np.inf


def test_more_exponents_than_dimensions():
    found = exponents([2 * rotation(2, 0)] * 3, 4)
    np.testing.assert_allclose(found[:2], math.log10(2))
    assert (found[2:] == -np.inf).all()


def test_nothing():
    assert np.isnan(exponents([], 2)).all()


@given(st.integers(0, 99))
def test_orthonormal(seed):
    rows = drawn(3, 7, seed)
    frame, lengths = orthonormal(rows)
    np.testing.assert_allclose(frame @ frame.T, np.eye(3), atol=1e-12)
    r = torch.linalg.qr(rows.T)[1].diagonal().abs()
    np.testing.assert_allclose(lengths, r, rtol=1e-9)
