from __future__ import annotations

from dataclasses import replace

import pytest

from keelscope.errors import UsageError
from keelscope.store.encoding import chunk_rows
from keelscope.store.layout import checked, extra_axes, row_shape
from keelscope.store.schema import GroupSpec, Site, StatisticSpec

SITES = (Site("a", "Linear"), Site("b", "Linear"))
NORM = StatisticSpec("norm", "1", "Norm.")


def test_empty_groups_and_repeated_scalars_are_left_out(layout):
    empty = (GroupSpec("gates", (NORM,), ()), GroupSpec("norms", (), SITES))
    stored = checked(replace(layout, groups=(*layout.groups, *empty), scalars=("loss", "lr", "loss")))
    assert [group.name for group in stored.groups] == ["gradients", "parameters"]
    assert stored.scalars == ("loss", "lr")


def test_shape_of_a_row_is_sites_then_extra_axes(layout):
    gradients = layout.groups[0]
    assert [row_shape(gradients, spec) for spec in gradients.statistics] == [(6,), (6,), (6, 3)]
    assert extra_axes(gradients) == {"quantile": (0.1, 0.5, 0.9)}


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (GroupSpec("a/b", (NORM,), SITES), "cannot be called 'a/b'"),
        (GroupSpec("scalars", (NORM,), SITES), "uses that name itself"),
        (GroupSpec("g", (NORM, NORM), SITES), "Two things are called 'norm'"),
        (GroupSpec("g", (StatisticSpec("kind", "", ""),), SITES), "cannot be called 'kind'"),
        (GroupSpec("g", (StatisticSpec("q", "", "", ("bin",)),), SITES), "missing: 'bin'"),
        (
            GroupSpec("g", (StatisticSpec("bin", "", "", ("bin",), {"bin": (1.0,)}),), SITES),
            "Two things are called 'bin'",
        ),
        (GroupSpec("gradients", (NORM,), SITES), "Two things are called 'gradients'"),
    ],
)
def test_a_layout_that_cannot_be_stored_is_refused_before_anything_is_written(layout, group, message):
    with pytest.raises(UsageError, match=message):
        checked(replace(layout, groups=(*layout.groups, group)))


def test_one_axis_has_one_set_of_coordinates(layout):
    two = tuple(
        StatisticSpec(name, "", "", ("bin",), {"bin": values}) for name, values in [("a", (1.0,)), ("b", (2.0,))]
    )
    with pytest.raises(UsageError, match="two sets of coordinates"):
        checked(replace(layout, groups=(GroupSpec("g", two, SITES),)))


@pytest.mark.parametrize(("sites", "rows"), [(1, 1024), (24, 256), (100, 64), (256, 64), (1000, 64)])
def test_a_chunk_is_a_power_of_two_rows_within_64_kib_where_64_rows_fit(sites, rows):
    assert chunk_rows(8 * min(sites, 256)) == rows
