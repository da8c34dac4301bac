"""Few modules are chosen, and what they show is all that is wanted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keelscope.topology.hearing import Hearing, enough

CALLS = st.lists(st.tuples(st.sampled_from("abcdef"), st.sets(st.integers(0, 9), max_size=4)), max_size=12)


@given(CALLS, st.sets(st.integers(0, 9)), st.sets(st.sampled_from("abcdef")))
def test_all_that_is_wanted_is_shown(calls, wanted, begun):
    found = enough(calls, wanted, begun)
    assert (found is None) == (not wanted <= set().union(*(things for _, things in calls)))
    if found is not None:
        heard = [things for path, things in calls if path in found | begun]
        assert wanted <= set().union(*heard)


@given(CALLS, st.sets(st.integers(0, 9)))
def test_no_more_modules_than_things(calls, wanted):
    assert len(enough(calls, wanted, set()) or ()) <= len(wanted)


def test_of_modules_inside_each_other_one_is_heard():
    calls = [("block.linear", [1]), ("block.branch", [1]), ("block", [0, 2])]
    assert enough(calls, {0, 1, 2}, {"block"}) == {"block.linear"}


def test_what_is_heard():
    hearing = Hearing(frozenset({"", "block"}), frozenset({"block.linear"}))
    assert "block" in hearing
    assert "block.linear" in hearing
    assert "block.branch" not in hearing
