from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from keelscope.errors import UsageError
from keelscope.store.rows import RowPacker, settle
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


@dataclass(frozen=True)
class Norms:
    """A group that waits."""

    norms: list[float]
    seen: list[bool] | None
    total: str = "loss"
    key: str = "of the same kind"

    def together(self, several):
        values = {"norm": np.array([each.norms for each in several])}
        return values, None if self.seen is None else np.array([each.seen for each in several])


FIVE = [3.0, 4.0, math.nan, math.inf, 7.0, 0.0]


@pytest.mark.parametrize(
    ("norms", "seen", "total"),
    [
        (FIVE, [True, True, False, False, False, True], 5.0),
        (FIVE, [True, False, True, False, False, False], math.nan),
        (FIVE, [False, False, False, True, True, False], math.inf),
        (FIVE, [False] * 6, math.nan),
        ([3.0, 4.0, math.nan, math.nan, 0.0, 0.0], None, 5.0),
        ([math.nan] * 6, None, math.nan),
        ([1.3e154] * 6, [True] * 6, math.inf),
    ],
)
def test_a_group_that_waits_tells_the_norm_of_what_was_seen(layout, norms, seen, total):
    packer = RowPacker(layout)
    others = Norms([1.0] + [0.0] * 5, None if seen is None else [True] * 6)
    rows = [
        Row(step, 0.0, {}, {"loss": None}, later={"gradients": it})
        for step, it in enumerate((others, Norms(norms, seen)))
    ]
    done = settle([packer.pack(row) for row in rows])
    place = layout.scalars.index("loss")
    assert done[0].scalars[place] == 1.0
    assert done[1].scalars[place] == pytest.approx(total, nan_ok=True)
    assert not done[1].later


@pytest.mark.parametrize("logged", [2.0, math.nan])
def test_a_total_that_was_logged_stays_what_it_is(layout, logged):
    row = Row(0, 0.0, {}, {"loss": logged}, later={"gradients": Norms([1.0] * 6, [True] * 6)})
    (done,) = settle([RowPacker(layout).pack(row)])
    assert done.scalars[layout.scalars.index("loss")] == pytest.approx(logged, nan_ok=True)


def test_of_two_groups_that_tell_one_number_the_first_does(layout):
    later = {"gradients": Norms([2.0] + [0.0] * 5, [True] * 6), "parameters": Norms([5.0, 0.0], [True] * 2)}
    (done,) = settle([RowPacker(layout).pack(Row(0, 0.0, {}, {"loss": None}, later=later))])
    assert done.scalars[layout.scalars.index("loss")] == 2.0
