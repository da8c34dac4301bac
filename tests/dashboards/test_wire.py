"""The binary answer: arrays come back as they were, codes within half a unit, marks exactly."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keelscope_dashboards import wire
from keelscope_dashboards.levels import Kind


@given(st.integers(0, 9), st.integers(0, 5), st.text(max_size=20))
def test_what_is_packed_comes_back(kit: ModuleType, rows: int, columns: int, text: str) -> None:
    given_arrays = {
        "steps": np.arange(rows, dtype=np.int64) * 2**40,
        "levels": np.linspace(-3, 3, rows * columns, dtype=np.float32).reshape(rows, columns),
        "kinds": np.arange(rows, dtype=np.uint8),
        "codes": np.arange(columns, dtype=np.int16),
    }
    header, arrays = kit.unpack(wire.pack({"text": text}, given_arrays))
    assert header == {"text": text}
    for name, array in given_arrays.items():
        np.testing.assert_array_equal(arrays[name], array)


@given(st.lists(st.floats(-400, 400, width=32), min_size=1, max_size=30))
def test_deviations_keep_half_a_unit(deviations: list[float]) -> None:
    given_deviations = np.array(deviations, dtype=np.float32)
    codes, unit = wire.encode_deviations(given_deviations, np.full(len(deviations), Kind.VALUE, dtype=np.uint8))
    assert unit == wire.RESOLUTION or np.abs(given_deviations).max() > 32
    assert np.abs(codes.astype(float) * unit - given_deviations).max() <= unit * 0.500001
    assert np.abs(codes.astype(int)).max() < 32766


def test_marks_have_codes_of_their_own() -> None:
    kinds = np.array([Kind.ZERO, Kind.NAN, Kind.ABSENT, Kind.INF, Kind.VALUE], dtype=np.uint8)
    codes, _ = wire.encode_deviations(np.zeros(5, dtype=np.float32), kinds)
    assert codes.tolist() == [wire.ZERO, wire.NAN, wire.ABSENT, wire.INF, 0]
