from __future__ import annotations

import pytest
import torch

from keelscope.models.norms import NORMS


def slow(kind: str, row: list[float], epsilon: float) -> list[float]:
    mean = sum(row) / len(row)
    if kind == "layer":
        row = [value - mean for value in row]
    square = sum(value * value for value in row)
    if kind == "scale":
        return [len(row) ** 0.5 * value / max(square**0.5, epsilon) for value in row]
    return [value / (square / len(row) + epsilon) ** 0.5 for value in row]


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
@pytest.mark.parametrize("kind", sorted(NORMS))
def test_norms_are_their_formula(kind, epsilon):
    x = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3 + 1
    got = NORMS[kind](6, epsilon).double()(x)
    expected = [[slow(kind, row.tolist(), epsilon) for row in rows] for rows in x]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_scale_norm_equals_rms_norm_up_to_epsilon_and_is_linear_below_it():
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale, rms = NORMS["scale"](8, 1e-12).double(), NORMS["rms"](8, 1e-12).double()
    torch.testing.assert_close(scale(x), rms(x), rtol=1e-6, atol=0)  # sqrt(8) is a float32 parameter
    floored = NORMS["scale"](8, 0.5).double()
    torch.testing.assert_close(floored(1e-3 * x) * 2, floored(2e-3 * x))
