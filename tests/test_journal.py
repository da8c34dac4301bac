"""Rows and scalars on their way to the writer."""

from __future__ import annotations

import math

import numpy as np
import pytest

from keelscope.errors import RecordingWarning, UsageError
from keelscope.journal import STANDARD_SCALARS, Journal, as_number
from keelscope.store.schema import GroupSpec, RunInfo, RunLayout, Site, StatisticSpec


def layout(scalars: tuple[str, ...]) -> RunLayout:
    group = GroupSpec("g", (StatisticSpec("s", "1", "A number."),), (Site("a", "Linear"), Site("b", "Linear")))
    return RunLayout(RunInfo("t", "id", "2026-01-01T00:00:00+00:00"), (group,), scalars)


def journal(path=None) -> Journal:
    made = Journal(path, "new")
    made.layout = layout
    return made


def row(number: float) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Values of two sites, one of which was seen."""
    return {"g": {"s": np.array([number, math.nan])}}, {"g": np.array([True, False])}


def test_order_and_gaps():
    """Rows with values, rows with scalars only, in step order; what was not logged is NaN."""
    j = journal()
    j.log(0, {"loss": 0.5})
    j.add(0, *row(10))
    j.flush(1)
    j.log(1, {"loss": 1.5})
    j.add(2, *row(12))
    j.log(2, {"lr": 0.1})
    j.flush(3)
    j.close()
    run = j.run()
    assert run["g/s"].steps.tolist() == [0, 2]
    assert run["g/s"].values[:, 0].tolist() == [10, 12]
    np.testing.assert_array_equal(run["scalars/loss"].values, [0.5, 1.5, math.nan])
    np.testing.assert_array_equal(run["scalars/lr"].values, [math.nan, math.nan, 0.1])


def test_nothing_is_written_before_the_first_values():
    j = journal()
    j.log(0, {"loss": 1.0})
    j.flush(5)
    with pytest.raises(UsageError, match="nothing is recorded yet"):
        j.run()
    j.add(3, *row(1))
    j.log(3, {"other": 2.0})
    j.close()
    run = j.run()
    assert run["scalars/loss"].steps.tolist() == [0, 3]
    assert {f"scalars/{name}" for name in (*STANDARD_SCALARS, "other")} <= set(run.keys())


def test_flush_keeps_what_is_not_yet_due():
    j = journal()
    for step in range(3):
        j.add(step, *row(step))
    j.flush(2)
    assert j.run()["g/s"].steps.tolist() == [0, 1]
    j.log(2, {"loss": 7.0})
    j.close()
    assert j.run()["scalars/loss"].values[2] == 7


def test_scalars_of_a_written_row_are_lost_with_one_warning():
    j = journal()
    j.add(0, *row(0))
    j.flush(1)
    with pytest.warns(RecordingWarning, match=r"\['loss'\] came after the row of step 0 was closed"):
        j.log(0, {"loss": 1.0})
    j.log(0, {"loss": 2.0})
    j.close()
    assert np.isnan(j.run()["scalars/loss"].values).all()


def test_a_name_that_comes_late_is_stored_from_there_on():
    j = journal()
    j.add(0, *row(0))
    j.flush(1)
    earlier = j.run()
    j.add(1, *row(1))
    j.log(1, {"new": 1.0})
    j.log(2, {"newer": 2.0})
    j.flush(2)
    j.close()
    run = j.run()
    np.testing.assert_array_equal(run["scalars/new"].values, [math.nan, 1.0, math.nan])
    np.testing.assert_array_equal(run["scalars/newer"].values, [math.nan, math.nan, 2.0])
    assert "scalars/new" not in earlier


def test_names_that_never_end_are_refused_at_some_point():
    j = journal()

    def log_many() -> None:
        for step in range(30):
            j.add(step, *row(step))
            j.log(step, {f"name{step - 1}": 1.0})
            j.flush(step + 1)

    with pytest.warns(RecordingWarning, match=r"\['name16'\] are not recorded: too many names came late") as caught:
        log_many()
    j.close()
    assert len(caught) == 1
    assert (j.takes("name15"), j.takes("name16"), j.takes("name30")) == (True, False, False)
    assert j.run()["scalars/name15"].values[16] == 1.0


def test_has():
    j = journal()
    j.log(4, {"loss": 1.0})
    assert j.lacks(4, {"loss": 1.0, "lr": 2.0}) == {"lr": 2.0}
    assert j.lacks(3, {"loss": 1.0}) == {"loss": 1.0}
    j.add(4, *row(0))
    j.flush(5)
    assert j.lacks(4, {"lr": 2.0}) == {}
    assert j.lacks(2, {"anything": 1.0}) == {}


def test_file(tmp_path):
    j = journal(tmp_path / "a.h5")
    assert j.path == tmp_path / "a.h5"
    j.add(0, *row(3))
    j.flush(1)
    assert j.path == tmp_path / "a.h5"
    assert j.run()["g/s"].values[0, 0] == 3
    j.add(1, *row(4))
    j.close()
    assert j.run()["g/s"].values[:, 0].tolist() == [3, 4]


@pytest.mark.parametrize("value", [1, 1.5, True, np.float32(2), np.array([3.0]), math.nan, -math.inf, "2.5"])
def test_numbers(value):
    number = as_number("x", value)
    assert isinstance(number, float)
    np.testing.assert_equal(number, float(np.asarray(value, dtype=float).reshape(())))


@pytest.mark.parametrize("value", ["nan", "text", None, [1, 2], 1j, object(), np.ones(2)])
def test_not_numbers(value):
    with pytest.raises(UsageError, match=r"log\(x=\.\.\.\) takes one real number; got \w+"):
        as_number("x", value)
