"""What the compiled kernel makes of norms, against the torch operations, on rows of every kind."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from keelscope import kernel
from keelscope.jacobian.closed_forms import row_gains, transported_squares
from keelscope.jacobian.norms import NormForm
from keelscope.kernel import Routine
from keelscope.probe import resolve_probes

pytestmark = pytest.mark.skipif(not kernel.is_compiled(), reason="the kernel is not built")

EPSILONS = (None, 0.0, 1e-12, 1e-5, 1.0)
ODD = ("none", "constant", "zero", "inf", "nan", "tiny", "huge")


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def forms(draw: st.DrawFn) -> NormForm:
    width = draw(st.sampled_from((1, 2, 3, 8, 17, 64)))
    gamma = draw(st.sampled_from(("one number", "of one entry", "vector", "sparse", "zero", "nan")))
    vector = 1 + 0.5 * drawn(draw(st.integers(0, 99)), width)
    return NormForm(
        draw(st.sampled_from(("layer", "rms"))),
        {
            "one number": -1.5,
            "of one entry": vector[:1],
            "vector": vector,
            "sparse": vector * (torch.arange(width) % 2 == 0),
            "zero": 0.0,
            "nan": vector.where(torch.arange(width) > 0, torch.nan),
        }[gamma],
        eps=draw(st.sampled_from(EPSILONS)),
        shape=(width,),
        floor=draw(st.sampled_from(("root", "sum", "max"))),
        unit=draw(st.sampled_from(("rms", "length"))),
    )


def rows_of(form: NormForm, odd: str, dtype: torch.dtype, seed: int) -> Tensor:
    x = drawn(seed, 2, 3, form.width, dtype=dtype)
    values = {"constant": 0.75, "zero": 0.0, "inf": torch.inf, "nan": torch.nan}
    if odd in values:
        x[1, 2] = values[odd]
    return x * {"tiny": 1e-20, "huge": 1e15}.get(odd, 1.0)


def by_torch(function, *arguments):
    with mock.patch.object(kernel, "_native", None):
        return function(*arguments)


def assert_near(found, expected, share, size):
    """To a share of itself, and to rounding of a size of which it is what a difference leaves."""
    close = np.isclose(found, expected, rtol=share, atol=0, equal_nan=True)
    assert (close | (abs(found - expected) <= 1e-13 * size)).all()


@np.errstate(all="ignore")
@given(forms(), st.sampled_from(ODD), st.sampled_from((torch.float32, torch.float64)), st.integers(0, 99))
def test_gains_are_those_of_torch(form, odd, dtype, seed):
    x = rows_of(form, odd, dtype, seed)
    found, expected = row_gains(form, x).table.numpy(), by_torch(row_gains, form, x).table.numpy()
    size = expected[:, 4:5] * expected[:, 5:6] ** 2  # of a gain of which the projection leaves next to nothing
    assert np.isnan(found).tolist() == np.isnan(expected).tolist()
    np.testing.assert_allclose(found[:, 1:], expected[:, 1:], rtol=1e-12)
    assert_near(found[:, :1], expected[:, :1], 1e-12, size)


@np.errstate(all="ignore")
@given(forms(), st.sampled_from(ODD), st.sampled_from((torch.float32, torch.float64)), st.integers(0, 99))
def test_transport_is_that_of_torch(form, odd, dtype, seed):
    x, gradient = rows_of(form, odd, dtype, seed), drawn(seed + 100, 2, 3, form.width, dtype=dtype)
    found = [t.numpy() for t in transported_squares(form, x, gradient)]
    expected = [t.numpy() for t in by_torch(transported_squares, form, x, gradient)]
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12)
    table = by_torch(row_gains, form, x).table.numpy()
    size = table[:, 1] ** 2 * expected[1]  # a bound of what arrives
    assert_near(found[0], expected[0], 1e-10, size)


def test_gains_are_added_up_and_counted():
    terms = {t.name: t for p in resolve_probes("norms") for s in p.statistics if (t := s.terms).routine is not None}
    edges = np.exp2(np.arange(-48, 48.25, 0.25))  # those between powers of 2 are rounded, by each library in its way
    gains = np.concatenate([[0.0, 1e-300, 1e300, np.inf, np.nan], edges[::4], edges * 0.999999, edges * 1.000001])
    for chosen in (gains, gains[gains < np.inf], gains[:0]):
        table = torch.from_numpy(np.tile(chosen[:, None], 6))
        for routine in (Routine.GAIN_SUMS, Routine.GAIN_COUNTS):
            (one,) = (t for t in terms.values() if t.routine is routine)
            packed = kernel.measure_all(routine, [table])[0] or b""
            width = len(packed) // len(one.columns)  # counts come in the narrowest integers that hold them
            found = np.frombuffer(packed, {1: np.uint8, 2: np.uint16, 8: np.float64}[width])
            np.testing.assert_allclose(found, one.of(table).numpy(), rtol=1e-13)
