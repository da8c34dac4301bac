"""Views of a room are its first entries."""

from __future__ import annotations

import numpy as np
import pytest

from keelscope.rooms import BLOCK, LENGTH, LINE, Room


@pytest.mark.parametrize("width", [1, 7, 128, LINE, LENGTH])
@pytest.mark.parametrize("count", [1, 100, LINE, LINE + 1, LENGTH + 5, BLOCK])
def test_views_cover_all_entries_once(count, width):
    room = Room()
    views = room.views(count, width)
    views.wide[:] = np.arange(count)
    for lines, rest, length in ((views.rows, views.rest, width), (views.long_rows, views.long_rest, LINE)):
        assert lines.shape == (count // length, 1, length)
        found = [*lines.ravel().tolist(), *(() if rest is None else rest.tolist())]
        assert found == list(range(count))
        assert (rest is None) == (count % length == 0)
    assert np.array_equal(views.columns[:, :, 0], views.rows[:, 0, :])
    assert np.shares_memory(views.wide, views.bits)
    assert len(views.bits) == count


def test_views_are_kept_up_to_a_number():
    room = Room()
    first = room.views(100, 7)
    assert room.views(100, 7) is first
    for count in range(1, 200):
        room.views(count, 1)
    assert len(room._views) < 100
    assert np.shares_memory(room.views(100, 7).wide, room.wide)


def test_a_room_begins_with_a_line_of_the_cache():
    assert all(Room().wide.ctypes.data % 64 == 0 for _ in range(5))
