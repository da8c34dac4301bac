from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from keelscope.errors import UsageError
from keelscope.store.rows import RowPacker
from keelscope.store.schema import GroupSpec, Row, StatisticSpec


def test_a_row_is_copied(layout):
    values = {"gradients": {"norm": np.ones(6)}}
    packed = RowPacker(layout).pack(Row(0, 0.0, values))
    values["gradients"]["norm"][:] = 5
    assert packed.groups["gradients"]["norm"].tolist() == [1.0] * 6


def test_what_is_absent_is_nan_and_not_observed(layout):
    packed = RowPacker(layout).pack(Row(0, 0.0, {"gradients": {"norm": np.array([1, np.nan, 0, np.inf, 2, 3.0])}}))
    assert np.isnan(packed.groups["gradients"]["rms"]).all()
    assert packed.groups["gradients"]["observed"].tolist() == [1, 0, 1, 1, 1, 1]
    assert np.isnan(packed.scalars).all()
    assert "parameters" not in packed.groups


def test_a_site_is_observed_as_soon_as_one_entry_of_an_extra_axis_is(layout):
    quantiles = np.full((6, 3), np.nan)
    quantiles[2] = 1.0
    packed = RowPacker(layout).pack(Row(0, 0.0, {"gradients": {"quantiles": quantiles}}))
    assert packed.groups["gradients"]["observed"].tolist() == [0, 0, 1, 0, 0, 0]


def test_the_row_can_say_that_a_nan_was_computed(layout):
    row = Row(0, 0.0, {"parameters": {"norm": np.array([np.nan, np.nan])}}, {}, {"parameters": np.array([True, False])})
    packed = RowPacker(layout).pack(row)
    assert packed.groups["parameters"]["observed"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(0, 0.0, {"gates": {}}), "holds group 'gates', which the layout does not have"),
        (Row(0, 0.0, {"gradients": {"mean": np.ones(6)}}), "holds gradients/mean, which"),
        (Row(0, 0.0, {"gradients": {"norm": np.ones(5)}}), r"gradients/norm has shape \(5,\), expected \(6,\)"),
        (Row(0, 0.0, {"gradients": {}}, {}, {"gradients": np.ones(5, bool)}), "expected one entry per site"),
        (Row(-1, 0.0, {}), "steps must increase"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(layout, row, message):
    with pytest.raises(UsageError, match=message):
        RowPacker(layout).pack(row)


def test_steps_must_increase(layout, make_row):
    packer = RowPacker(layout)
    packer.pack(make_row(layout, 4))
    with pytest.raises(UsageError, match="Row 4 comes after row 4"):
        packer.pack(make_row(layout, 4))


def test_rows_of_groups_that_the_layout_left_out_are_ignored(layout):
    gates = GroupSpec("gates", (StatisticSpec("value", "1", "Value."),), ())
    packer = RowPacker(replace(layout, groups=(*layout.groups, gates)))
    assert "gates" not in packer.pack(Row(0, 0.0, {"gates": {"value": np.ones(0)}})).groups


def test_scalars_that_the_layout_lacks_are_remembered_by_name(layout):
    packer = RowPacker(layout)
    packed = packer.pack(Row(0, 0.0, {}, {"loss": 1.0, "late": 2.0}))
    assert (packed.scalars[0], packer.unknown_scalars) == (1.0, {"late"})
