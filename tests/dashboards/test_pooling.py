"""Pooling: no single extreme or broken cell is lost, and pieces give what the whole gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keelscope_dashboards.levels import Kind, Levels
from keelscope_dashboards.pooling import Pool, Tile, band, pool


@st.composite
def levels(draw: st.DrawFn, layers: int | None = None) -> Levels:
    steps = draw(st.integers(1, 40))
    width = layers or draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kinds = rng.choice(np.array([0, 1, 1, 1, 1, 2, 3, 4], dtype=np.uint8), (steps, width))
    decades = np.where(kinds == Kind.VALUE, rng.normal(0, 5, (steps, width)), 0).astype(np.float32)
    at = np.cumsum(rng.integers(1, 9, steps))
    return Levels(decades, kinds, rng.normal(0, 1, steps).astype(np.float32), at)


def slow_cell(one: Levels, rows: slice, layer: int) -> tuple[int, float]:
    """What a bin must show for a layer: the most severe kind and the farthest deviation, upwards when tied."""
    kind = max(one.kinds[rows, layer])
    farthest = max(one.deviations[rows, layer].tolist(), key=lambda d: (abs(d), d))
    return kind, farthest


@given(levels(), st.integers(1, 9))
def test_every_bin_keeps_the_farthest_level_and_the_worst_kind(one: Levels, rows: int) -> None:
    tile = pool(one, rows)
    assert len(tile) == -(-len(one.steps) // rows)
    for bin_ in range(len(tile)):
        span = slice(bin_ * rows, (bin_ + 1) * rows)
        assert tile.first[bin_] == one.steps[span][0]
        assert tile.last[bin_] == one.steps[span][-1]
        for layer in range(one.kinds.shape[1]):
            kind, farthest = slow_cell(one, span, layer)
            assert tile.kinds[bin_, layer] == kind
            assert tile.deviations[bin_, layer] == np.float32(farthest)


@settings(max_examples=60)
@given(levels(layers=3), st.lists(st.integers(0, 12), max_size=6), st.integers(1, 12))
def test_pieces_give_what_the_whole_gives(one: Levels, cuts: list[int], limit: int) -> None:
    pieces, whole = Pool(3, limit), Pool(3, limit)
    whole.extend(one)
    start = 0
    for length in [*cuts, len(one.steps)]:
        piece = slice(start, start + length)
        pieces.extend(Levels(one.decades[piece], one.kinds[piece], one.reference[piece], one.steps[piece]))
        start = min(len(one.steps), start + length)
    assert pieces.seen == whole.seen == len(one.steps)
    assert_same(pieces.tile, whole.tile)
    assert_same(whole.tile, pool(one, whole.tile.rows))
    assert len(whole.tile) <= limit


def assert_same(left: Tile, right: Tile) -> None:
    assert left.rows == right.rows
    for field in ("first", "last", "reference", "deviations", "kinds"):
        np.testing.assert_array_equal(getattr(left, field), getattr(right, field))


@given(levels(layers=1), st.integers(1, 9))
def test_a_band_spans_every_value_of_its_rows(one: Levels, rows: int) -> None:
    spanned = band(one, rows)
    for bin_ in range(len(spanned.first)):
        piece = slice(bin_ * rows, (bin_ + 1) * rows)
        values = one.decades[piece, 0][one.kinds[piece, 0] == Kind.VALUE]
        if values.size:
            assert (spanned.low[bin_], spanned.high[bin_]) == (values.min(), values.max())
        else:
            assert np.isnan(spanned.low[bin_])
            assert np.isnan(spanned.high[bin_])


def test_a_single_spike_among_thousands_stays() -> None:
    decades = np.zeros((4096, 2), dtype=np.float32)
    decades[1234, 1] = -7
    kinds = np.ones_like(decades, dtype=np.uint8)
    kinds[777, 0] = Kind.ZERO
    flat = Levels(decades, kinds, np.zeros(4096, dtype=np.float32), np.arange(4096))
    tile = pool(flat, 512)
    assert tile.deviations.min() == -7
    assert (tile.kinds == Kind.ZERO).sum() == 1
