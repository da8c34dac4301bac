"""Largest singular values by Golub-Kahan-Lanczos against dense decompositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keelscope.jacobian.lanczos import bidiagonalise, leading_singular_values, ritz_values
from keelscope.jacobian.operators import matrix_operator


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=generator(seed))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 999))
def test_as_many_steps_as_dimensions_give_the_whole_spectrum(rows, columns, seed):
    matrix = drawn(rows, columns, seed)
    count = min(rows, columns)
    values, errors = leading_singular_values(matrix_operator(matrix), count, generator=generator(seed))
    exact = torch.linalg.svdvals(matrix).numpy()
    np.testing.assert_allclose(values[0], exact[0], rtol=1e-9)
    np.testing.assert_allclose(values, exact, rtol=1e-7, atol=1e-9 * exact[0])
    assert (errors < 1e-7 * exact[0]).all()


@given(st.integers(1, 8), st.integers(0, 999))
def test_never_above_the_truth_and_within_the_residual(steps, seed):
    matrix = drawn(30, 20, seed)
    values, errors = leading_singular_values(matrix_operator(matrix), steps, steps=steps, generator=generator(seed))
    exact = torch.linalg.svdvals(matrix).numpy()
    assert (values <= exact[:steps] * (1 + 1e-12)).all()
    distance = np.abs(values[:, None] - exact).min(axis=1)
    assert (distance <= errors + 1e-10).all()


@given(st.floats(-8, 8), st.integers(0, 99))
def test_scales_with_the_jacobian(exponent, seed):
    matrix, scale = drawn(12, 10, seed), 10.0**exponent
    once = leading_singular_values(matrix_operator(matrix), 2, steps=5, generator=generator(1))
    scaled = leading_singular_values(matrix_operator(scale * matrix), 2, steps=5, generator=generator(1))
    np.testing.assert_allclose(np.stack(scaled), scale * np.stack(once), rtol=1e-6)


@given(st.integers(0, 99))
def test_a_rotated_output_changes_nothing(seed):
    matrix = drawn(12, 10, seed)
    rotation = torch.linalg.qr(drawn(12, 12, seed + 1))[0]
    once = leading_singular_values(matrix_operator(matrix), 2, steps=5, generator=generator(1))
    rotated = leading_singular_values(matrix_operator(rotation @ matrix), 2, steps=5, generator=generator(1))
    np.testing.assert_allclose(np.stack(rotated), np.stack(once), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("factor", [0.0, 0.3, 1e6])
def test_a_scaled_rotation_stops_after_one_step(size, factor, orthogonal):
    operator = matrix_operator(factor * orthogonal(size))
    alphas, betas = bidiagonalise(operator, 4, generator())
    assert alphas.shape == betas.shape == (4,)
    values, errors = ritz_values(alphas.numpy(), betas.numpy())
    assert values == pytest.approx([factor], rel=1e-12)
    assert errors == pytest.approx([0], abs=1e-12 * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_converged_values_do_not_come_twice(dtype):
    """One large value converges at once; without orthogonalisation its copies would follow."""
    matrix = torch.diag(torch.tensor([1e3, *np.linspace(1, 2, 59)], dtype=torch.float64)).to(dtype)
    values, _ = leading_singular_values(matrix_operator(matrix), 3, steps=50, generator=generator())
    np.testing.assert_allclose(values, [1e3, 2.0, 1.98276], rtol=1e-4)


@pytest.mark.parametrize("scheme", ["pre_ln", "post_ln", "keel"])
def test_blocks(scheme, block):
    """The values of a Keel block lie close together (1.231, 1.222, 1.218), which takes more steps."""
    one = block(scheme)
    exact = float(torch.linalg.svdvals(one.jacobian)[0])
    for steps, tolerance in ((10, 1e-2 if scheme == "keel" else 2e-5), (20, 5e-5 if scheme == "keel" else 1e-9)):
        found = leading_singular_values(one.operator(), steps=steps, generator=generator())
        assert found[0][0] == pytest.approx(exact, rel=tolerance)
        assert abs(found[0][0] - exact) <= found[1][0] + 1e-9


def test_both_products_are_needed():
    from dataclasses import replace

    with pytest.raises(ValueError, match="no jvp"):
        bidiagonalise(replace(matrix_operator(torch.eye(2)), jvp=None), 2, generator())
