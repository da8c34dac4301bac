"""Levels: the layer axis, the four kinds of cells, the reference."""

from __future__ import annotations

import numpy as np
import pytest

from keelscope.store.schema import Site
from keelscope.store.series import Series
from keelscope_dashboards.levels import Kind, layer_axis, levels_of


def series(values: list[list[float]], sites: tuple[Site, ...], unit: str = "") -> Series:
    return Series("gradients/rms", np.array(values), np.arange(len(values)) * 10, sites, unit)


def plain(count: int) -> tuple[Site, ...]:
    return tuple(Site(f"layers.{i}", "Layer", "layer", "layers", i) for i in range(count))


def test_axis_is_the_entries_of_the_longest_stack_in_order() -> None:
    sites = (
        Site("embedding", "Embedding"),
        Site("layers.1", "Layer", "layer", "layers", 1),
        Site("layers.0", "Layer", "layer", "layers", 0),
        Site("layers.0.norm", "LayerNorm", "norm", "layers", 0),
        Site("short.0", "Other", "layer", "short", 0),
    )
    assert layer_axis(sites).labels == ("layers.0", "layers.1")
    assert layer_axis(sites, stack="short").labels == ("short.0",)


def test_axis_is_every_site_without_a_stack() -> None:
    sites = (Site("conv", "Conv2d"), Site("head", "Linear"))
    assert layer_axis(sites).labels == ("conv", "head")


def test_parameters_of_a_layer_are_joined_by_the_root_of_squares() -> None:
    sites = tuple(
        Site(f"net.layers.{i}.{name}", "Parameter", "parameter", "net.layers", i)
        for i in range(2)
        for name in ("weight", "bias")
    )
    axis = layer_axis(sites)
    assert axis.labels == ("net.layers.0", "net.layers.1")
    levels = levels_of(series([[3.0, 4.0, 6.0, 8.0]], sites), axis, reference="none")
    assert 10 ** levels.decades[0] == pytest.approx([5.0, 10.0])


def test_an_unobserved_parameter_takes_no_part_but_a_nan_does() -> None:
    sites = tuple(Site(f"layers.0.{name}", "Parameter", "parameter", "layers", 0) for name in ("weight", "bias"))
    values = series([[3.0, np.nan]], sites)
    seen = levels_of(values, layer_axis(sites), observed=np.array([[True, False]]))
    broken = levels_of(values, layer_axis(sites), observed=np.array([[True, True]]))
    assert 10 ** seen.decades[0, 0] == pytest.approx(3.0)
    assert broken.kinds.tolist() == [[Kind.NAN]]


def test_zero_nan_inf_and_absent_stay_apart() -> None:
    values = [[1.0, 0.0, np.nan, np.inf, np.nan]]
    levels = levels_of(series(values, plain(5)), layer_axis(plain(5)), observed=np.array([[True] * 4 + [False]]))
    assert levels.kinds.tolist() == [[Kind.VALUE, Kind.ZERO, Kind.NAN, Kind.INF, Kind.ABSENT]]
    marked = levels.marked(absolute=True)[0]
    assert marked[0] == 0
    assert marked[1] == -np.inf
    assert marked[3] == np.inf
    assert np.isnan(marked[[2, 4]]).all()


def test_without_a_mask_a_row_or_column_of_nan_was_not_observed() -> None:
    values = [[np.nan, np.nan, np.nan], [1.0, np.nan, 2.0], [1.0, np.nan, np.nan]]
    kinds = levels_of(series(values, plain(3)), layer_axis(plain(3))).kinds
    absent, nan = Kind.ABSENT, Kind.NAN
    assert kinds.tolist() == [[absent] * 3, [Kind.VALUE, absent, Kind.VALUE], [Kind.VALUE, absent, nan]]


def test_a_series_in_log10_is_taken_as_decades() -> None:
    levels = levels_of(series([[-3.0, -np.inf]], plain(2), unit="log10"), layer_axis(plain(2)), reference="none")
    assert levels.decades[0, 0] == -3
    assert levels.kinds[0, 1] == Kind.ZERO


@pytest.mark.parametrize(("reference", "expected"), [("output", 0.0), ("input", -4.0), ("median", -2.0), ("none", 0.0)])
def test_reference_is_a_side_the_median_or_nothing(reference: str, expected: float) -> None:
    values = [[1e-4, 1e-3, 1e-2, 1e-1, 1.0]]
    levels = levels_of(series(values, plain(5)), layer_axis(plain(5)), reference=reference)  # type: ignore[arg-type]
    assert levels.reference == pytest.approx([expected], abs=1e-6)
    assert levels.deviations[0, 0] == pytest.approx(-4 - expected, abs=1e-6)


def test_a_dead_reference_side_falls_back_to_what_is_left() -> None:
    levels = levels_of(series([[1e-4, 1e-4, 0.0]], plain(3)), layer_axis(plain(3)), reference="output")
    assert levels.reference == pytest.approx([-4.0])
    nothing = levels_of(series([[0.0, 0.0, 0.0]], plain(3)), layer_axis(plain(3)), reference="output")
    assert nothing.reference.tolist() == [0.0]
