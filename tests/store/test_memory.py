from __future__ import annotations

import numpy as np
import pytest

from keelscope.errors import UsageError
from keelscope.store.memory import MemoryWriter


def test_a_run_shows_new_rows_after_refresh_only(layout, make_row):
    writer = MemoryWriter(layout)
    run = writer.run()
    writer.append(make_row(layout, 0))
    assert run.steps.size == 0
    assert (run.refresh(), run.steps.tolist(), run.refresh()) == (True, [0], False)
    assert writer.run().steps.tolist() == [0]


def test_a_run_is_live_until_the_writer_is_closed(layout, make_row):
    writer = MemoryWriter(layout)
    run = writer.run()
    assert (run.live, run.path) == (True, None)
    writer.close()
    writer.close()
    run.refresh()
    assert not run.live
    with pytest.raises(UsageError, match="This recording is closed"):
        writer.append(make_row(layout, 0))


def test_many_rows_keep_their_order_and_values(layout, make_row):
    writer = MemoryWriter(layout)
    for step in range(300):
        writer.append(make_row(layout, step))
    run = writer.run()
    assert run["gradients/norm"].values.shape == (300, 6)
    for step in (0, 17, 299):
        assert np.array_equal(run["gradients/norm"].at(step), make_row(layout, step).values["gradients"]["norm"])
    assert run["parameters/norm"].steps.tolist() == list(range(0, 300, 2))
