"""Who records what, worked out without processes: every entry of every parameter is recorded exactly once."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keelscope import distributed
from keelscope.distributed import Ranks
from keelscope.probe import Tap, TensorProbe, available_probes
from keelscope.statistics import NONFINITE_COUNT, NORM, RMS, Statistic

WHOLE = ["kurtosis", "jacobian_gain_quantile", "minimum", "ratio"]
"""Statistics that ranks cannot put together."""


@st.composite
def meshes(draw):
    """Sizes of a mesh, and for each of some parameters the dimensions of it that it is split over."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    splits = st.frozensets(st.integers(0, len(sizes) - 1))
    return sizes, draw(st.lists(splits, min_size=1, max_size=3))


@given(meshes())
def test_every_entry_is_recorded_once(drawn):
    sizes, parameters = drawn
    ranks = np.arange(np.prod(sizes)).reshape(sizes)
    for split in parameters:
        recorded = []
        for place in product(*map(range, sizes)):
            groups = {along(ranks, place, {dim}) for dim in range(len(sizes))}
            if distributed._counted(int(ranks[place]), along(ranks, place, split), groups):
                recorded.append(tuple(at for dim, at in enumerate(place) if dim in split))
        assert sorted(recorded) == sorted(product(*(range(size) for dim, size in enumerate(sizes) if dim in split)))


def along(ranks, place, dims):
    return tuple(sorted(ranks[tuple(slice(None) if dim in dims else at for dim, at in enumerate(place))].reshape(-1)))


def test_statistics_say_how_ranks_combine():
    found = {s for probe in available_probes().values() for s in (*probe.statistics, *probe.optional)}
    assert sorted({s.name for s in found if not s.across_ranks}) == sorted(WHOLE)
    assert {s.across_ranks for s in found} <= {"", "sum", "max", "mean", "rms", "root_sum_squares"}


@pytest.mark.parametrize(("statistic", "expected"), [(NORM, 2 * 3.0), (NONFINITE_COUNT, 4 * 3.0), (RMS, 3.0)])
def test_a_batch_stands_for_four_like_it(statistic: Statistic, expected: float):
    ranks = Ranks(size=4, batches=4, widths=np.ones(2))
    values, probe = {statistic.name: np.array([3.0, np.nan])}, TensorProbe("p", Tap.OUTPUT, (statistic,))
    ranks.whole(probe, values, np.array([True, False]), ())
    assert values[statistic.name].tolist() == pytest.approx([expected, np.nan], nan_ok=True)


def test_a_gate_that_is_a_parameter_is_averaged_already():
    probe = TensorProbe("g", Tap.GATE_GRADIENT, (NORM,))
    values = {"norm": np.array([3.0, 3.0])}
    Ranks(size=4, batches=4, divisor=4.0, parts=np.array([1.0])).whole(probe, values, np.ones(2, np.bool_), [0, -1])
    assert values["norm"].tolist() == [3.0, 3.0 * 2 / 4]


def test_nothing_changes_on_one_process():
    assert distributed.place() == (0, 1)
    assert Ranks().provenance(Tap.OUTPUT) == {}
    assert Ranks().combination(NORM, Tap.PARAMETER) == "rms"
    assert Ranks().part().world_size == 1
